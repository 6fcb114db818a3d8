"""A run on disk: every file name, format, reader and writer."""

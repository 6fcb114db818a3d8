"""Command line: sub-commands, overrides, error messages and help."""

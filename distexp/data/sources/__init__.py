"""Own data: rows of files and of the library datasets as text for language models, and folders of images."""

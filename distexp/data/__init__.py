"""Data sets: readers, tokenizers, batches and their distribution over ranks."""

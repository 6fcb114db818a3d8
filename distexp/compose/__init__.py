"""Composition of the cells of a command, before any run starts."""

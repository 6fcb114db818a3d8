"""Engines: the trainers that run a training loop, native or of another library."""

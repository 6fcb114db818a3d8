"""Checkpoints: writing them during a training, and resuming from them."""

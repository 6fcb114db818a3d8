"""Tests of ``distexp.checkpoints``."""

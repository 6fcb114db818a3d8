"""Comparison of distributed training strategies."""

__version__ = "0.1.0"

"""Benchmarks of distexp's own overhead. They are scripts, not tests: run them on an idle machine."""

"""Benchmarks of distexp's own overhead.

They are scripts and not tests: run them on an idle machine.
"""

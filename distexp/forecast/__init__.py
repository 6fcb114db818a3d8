"""Forecast of a profiled run on other numbers of GPUs. No module of this package imports torch."""

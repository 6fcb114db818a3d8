"""Tests of ``distexp.measure.profiling``."""

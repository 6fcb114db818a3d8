"""Tests of ``distexp.measure``."""

"""Tests of ``distexp.forecast``."""

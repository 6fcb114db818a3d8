"""Tests of ``distexp.resolve``."""

"""Tests of ``distexp.data``."""

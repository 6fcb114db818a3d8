"""Tests of ``distexp.hardware``."""

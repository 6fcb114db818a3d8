"""Tests of ``distexp.report``."""

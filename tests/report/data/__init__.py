"""Tests of ``distexp.report.data``."""

"""Tests of ``distexp.report.figures``."""

"""Tests of ``distexp.report.page``."""

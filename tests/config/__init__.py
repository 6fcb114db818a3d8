"""Tests of ``distexp.config``."""

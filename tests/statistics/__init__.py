"""Tests of ``distexp.statistics``."""

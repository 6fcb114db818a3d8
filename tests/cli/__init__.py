"""Tests of ``distexp.cli``."""

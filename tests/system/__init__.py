"""Tests of ``distexp.system``."""

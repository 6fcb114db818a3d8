"""Tests of ``distexp.preflight``."""

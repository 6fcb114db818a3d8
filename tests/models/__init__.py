"""Tests of ``distexp.models``."""

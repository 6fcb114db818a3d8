"""Tests of ``distexp.tracking``."""

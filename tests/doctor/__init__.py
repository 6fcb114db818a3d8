"""Tests of ``distexp.doctor``."""

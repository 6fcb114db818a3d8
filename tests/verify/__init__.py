"""Tests of ``distexp verify``."""

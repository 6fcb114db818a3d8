"""Tests of the explanation of profiled runs."""

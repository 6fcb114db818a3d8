"""Tests of distexp.engines."""

"""Tests of distexp choose."""

"""Tests of distexp.strategies."""

"""Tests of energy and cost."""

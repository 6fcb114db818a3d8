"""Tests of distexp.training."""

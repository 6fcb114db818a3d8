"""Tests of ``distexp.measure.memory``."""

"""Tests of the facts of hardware."""

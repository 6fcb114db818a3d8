"""Tests of distributed/."""

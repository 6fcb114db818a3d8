"""Tests of the search for a micro-batch size."""

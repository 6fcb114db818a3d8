"""Tests of the terminal output about runs."""

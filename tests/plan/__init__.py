"""Tests of the computed memory."""

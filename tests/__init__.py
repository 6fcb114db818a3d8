"""Tests of distexp."""

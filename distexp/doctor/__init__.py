"""Checks of a machine: what can be trained on it. ``distexp doctor [--json]``."""

"""Measurements of a run: memory, time per step, floating point operations, and energy."""

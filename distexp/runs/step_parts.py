"""The parts of a training step, which add up to it."""

from __future__ import annotations

PARTS = {
    "matmul": "matrix kernels",
    "other_kernels": "other kernels",
    "exposed_communication": "exposed communication",
    "waiting": "waiting for other ranks",
    "launch_idle": "GPU idle: slow launches",
    "data_wait": "data wait",
    "optimizer": "optimizer",
    "host": "host work",
}
"""Titles of the parts by name. ``metrics.step_breakdown`` has each one in milliseconds, as ``matmul_ms``."""

HIDDEN = "hidden_communication"
"""Communication at the same time as kernels. It is not part of the sum."""

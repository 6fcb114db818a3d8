"""Units of memory and speed."""

from __future__ import annotations

MIB = 2**20
"""Bytes in a MiB."""

GIB = 2**30
"""Bytes in a GiB."""


def format_tflops(tflops: float) -> str:
    """Format a rate in TFLOP/s: ``790 TFLOP/s``, ``0.0312 TFLOP/s``."""
    return f"{tflops:,.0f} TFLOP/s" if tflops >= 100 else f"{tflops:.3g} TFLOP/s"

"""Units of memory and speed."""

from __future__ import annotations

MIB = 2**20
"""Bytes in a MiB."""

GIB = 2**30
"""Bytes in a GiB."""

MIB_PER_GB = 1024.0
"""MiB in a GB of ``2**30`` bytes."""


def format_tflops(tflops: float) -> str:
    """Format a rate that is given in TFLOP/s: ``790 TFLOP/s``, ``31.2 GFLOP/s``."""
    if tflops >= 100:
        return f"{tflops:,.0f} TFLOP/s"
    return f"{tflops:.3g} TFLOP/s" if tflops >= 0.1 else f"{tflops * 1000:.3g} GFLOP/s"

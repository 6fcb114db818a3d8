"""Units of memory and speed."""

from __future__ import annotations

MIB = 2**20
"""Bytes in a MiB."""

GIB = 2**30
"""Bytes in a GiB."""

MIB_PER_GB = 1024.0
"""MiB in a GB of ``2**30`` bytes."""


LEAST_GB = 0.1
"""Less memory is shown in MB."""


def format_memory(mib: float, digits: int = 1) -> str:
    """Format a memory: ``1.5 GB``, and below 0.1 GB ``12.3 MB``. A GB has 1,024 MB."""
    if mib >= LEAST_GB * MIB_PER_GB:
        return f"{mib / MIB_PER_GB:,.{digits}f} GB"
    return f"{mib:.3g} MB"


def format_tflops(tflops: float) -> str:
    """Format a rate that is given in TFLOP/s: ``790 TFLOP/s``, ``31.2 GFLOP/s``."""
    if tflops >= 100:
        return f"{tflops:,.0f} TFLOP/s"
    return f"{tflops:.3g} TFLOP/s" if tflops >= 0.1 else f"{tflops * 1000:.3g} GFLOP/s"

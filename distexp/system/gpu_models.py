"""Known GPU models: the memory that a process can use, the workspaces of cuBLAS, and peak rates of the datasheets."""

from __future__ import annotations

import re
from collections.abc import Mapping

from distexp.system.units import MIB

GPU_MODELS: Mapping[str, float] = {
    "t4-16gb": 14_909,
    "v100-16gb": 16_148,
    "p100-16gb": 16_276,
    "a10-24gb": 22_589,
    "l4-24gb": 22_558,
    "rtx3090-24gb": 24_258,
    "rtx4090-24gb": 24_074,
    "rtx5090-32gb": 32_112,
    "v100-32gb": 32_501,
    "a100-40gb": 40_335,
    "a40-48gb": 45_404,
    "l40s-48gb": 45_455,
    "rtx6000ada-48gb": 48_517,
    "a6000-48gb": 48_537,
    "h100-80gb": 80_998,
    "a100-80gb": 81_050,
    "h100-94gb": 95_334,
    "gh200-96gb": 96_768,
    "h200-141gb": 143_073,
    "b200-180gb": 182_630,
}
"""``total_memory`` of torch in MiB. It is less than the name, and depends on the driver by up to 1 %."""

USABLE_SHARE = 0.99
"""``total_memory`` of torch, as a fraction of what NVML reports. The driver reserves the rest."""


def gpus_with(mib: float) -> list[str]:
    """Return the known models with at least this memory, smallest first."""
    return sorted((name for name, memory in GPU_MODELS.items() if memory >= mib), key=lambda name: GPU_MODELS[name])


def _peaks(tensor: float, fp32: float, *, bf16: bool = True) -> Mapping[str, float]:
    return {"fp16": tensor, "fp32": fp32, **({"bf16": tensor} if bf16 else {})}


PEAK_TFLOPS: Mapping[str, Mapping[str, float]] = {
    "B200": _peaks(2250.0, 75.0),
    "GH200": _peaks(989.5, 67.0),
    "H200": _peaks(989.5, 67.0),
    "H200 NVL": _peaks(835.5, 60.0),
    "H100": _peaks(989.5, 67.0),
    "H100 NVL": _peaks(835.5, 60.0),
    "H100 PCIE": _peaks(756.5, 51.0),
    "A100": _peaks(312.0, 19.5),
    "A40": _peaks(149.7, 37.4),
    "A10": _peaks(125.0, 31.2),
    "L40S": _peaks(362.0, 91.6),
    "L4": _peaks(121.0, 30.3),
    "V100": _peaks(125.0, 15.7, bf16=False),
    "V100 PCIE": _peaks(112.0, 14.0, bf16=False),
    "V100S": _peaks(130.0, 16.4, bf16=False),
    "T4": _peaks(65.0, 8.1, bf16=False),
}
"""Peaks of dense matrix products in TFLOP/s, from the datasheets, by parts of the name that torch reports.

A name without a form factor is the SXM module. The datasheets of H100 and H200 print the doubled rates of sparse
matrices. fp32 is without TF32. GPUs older than Ampere have no bf16.
"""


def peak_tflops(gpu_name: str | None, precision: str) -> float | None:
    """Return the peak of a GPU in TFLOP/s for a precision; None if it is unknown.

    The peak of a MIG instance, a part of a GPU, is unknown.

    Args:
        gpu_name: name that torch reports, such as ``NVIDIA H100 80GB HBM3``.
        precision: fp32, bf16 or fp16.
    """
    parts = set(re.split(r"[^A-Z0-9]+", (gpu_name or "").upper()))
    found = [name for name in PEAK_TFLOPS if parts.issuperset(name.split())]
    if not found or "MIG" in parts:
        return None
    return PEAK_TFLOPS[max(found, key=len)].get(precision)


LARGE_WORKSPACE = 32 * MIB
"""Bytes that torch gives to each handle of cuBLAS on GPUs since Hopper."""

SMALL_WORKSPACE = 8 * MIB + MIB // 8
"""Bytes that torch gives to each handle of cuBLAS on older GPUs."""

SINCE_HOPPER = (
    *("h100", "h200", "h20", "h800", "b100", "b200", "b300", "gb10", "blackwell"),
    *("5050", "5060", "5070", "5080", "5090", "pro6000"),
)
"""Parts of the names of GPUs since Hopper, in lower case and without spaces."""


def cublas_workspace(name: str | None) -> int:
    """Return the bytes that each handle of cuBLAS keeps on a GPU.

    Args:
        name: a model of ``GPU_MODELS``, or the name that NVML reports. None for an unknown GPU: the larger size.
    """
    if name is None or any(part in _compact(name) for part in SINCE_HOPPER):
        return LARGE_WORKSPACE
    return SMALL_WORKSPACE


def _compact(name: str) -> str:
    return name.lower().replace(" ", "")


DEFAULT_MULTIPROCESSORS = 132
"""Multiprocessors of an H100."""

MULTIPROCESSORS: Mapping[str, int] = {
    "p100": 56,
    "v100": 80,
    "t4": 40,
    "3090": 82,
    "a10": 72,
    "a40": 84,
    "a6000": 84,
    "a100": 108,
    "4090": 128,
    "6000ada": 142,
    "l4": 58,
    "l40": 142,
    "h20": 78,
    "h100": 132,
    "h100pcie": 114,
    "h200": 132,
    "5090": 170,
    "b200": 148,
    "b300": 148,
    "gb200": 148,
}
"""Multiprocessors of GPUs, by parts of their names in lower case and without spaces."""


def multiprocessors(name: str | None) -> int:
    """Return how many multiprocessors a GPU has: that of an H100 if it is unknown.

    Args:
        name: a model of ``GPU_MODELS``, or the name that NVML reports.
    """
    found = [part for part in MULTIPROCESSORS if part in _compact(name or "")]
    longest = max(found, key=len, default="")  # "a100" is a better match than "a10".
    return MULTIPROCESSORS.get(longest, DEFAULT_MULTIPROCESSORS)

"""Known GPU models, and the memory that a process can use on each one."""

from __future__ import annotations

from collections.abc import Mapping

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

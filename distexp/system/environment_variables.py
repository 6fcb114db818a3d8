"""Environment variables that change speed or memory but are no part of the configuration."""

from __future__ import annotations

import os
from functools import cache

CAPTURED_PREFIXES = (
    *("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_"),  # communication
    *("PYTORCH_", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_", "NVIDIA_TF32_OVERRIDE"),
)
"""Prefixes of the variables that a record contains."""


@cache
def captured_environment() -> dict[str, str]:
    """Return the variables to record, as they were at the first call.

    Call it before DeepSpeed is imported, because DeepSpeed sets some of these variables itself.
    """
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(CAPTURED_PREFIXES)}

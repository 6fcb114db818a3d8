"""Variables that change speed or memory without a trace in the configuration, before libraries set theirs."""

from __future__ import annotations

import os

STEERING = (
    *("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_"),  # how workers talk to each other
    *("PYTORCH_", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_", "NVIDIA_TF32_OVERRIDE"),
)
"""How their names begin."""

GIVEN = {name: value for name, value in sorted(os.environ.items()) if name.startswith(STEERING)}
"""Those that this process was given: DeepSpeed, which a run loads later, sets some for itself."""

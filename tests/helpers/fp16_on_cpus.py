"""fp16 with DeepSpeed on a CPU, which distexp and DeepSpeed refuse because it is slow there."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from distexp.runs.record import RunSpec


def allow_fp16(specs: Iterable[RunSpec]) -> None:
    """Let DeepSpeed accept fp16 in this process, if one of the runs uses it."""
    if all(spec.config.precision.name != "fp16" for spec in specs):
        return
    from deepspeed.accelerator import get_accelerator

    accelerator = type(get_accelerator())
    accelerator.is_fp16_supported = lambda self: True
    accelerator.supported_dtypes = lambda self: [torch.float32, torch.float16, torch.bfloat16]

"""Clipping of ZeRO stages 1 and 2 without waits for the GPU, for ``deepspeed.async_update``.

DeepSpeed computes the norm of the gradients with two kernels for each parameter, and reads it twice for each group of
parameters. So the CPU starts the kernels of an update after the GPU has finished the backward pass, and the GPU waits
for them. Here a few kernels compute the norm of a group, and the CPU reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import deepspeed
import torch
from deepspeed import comm
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

EPSILON = 1e-6
"""Added to the norm before clipping, as DeepSpeed does."""


def avoid_waits(optimizer: Any) -> None:
    """Replace the clipping of a DeepSpeedZeroOptimizer without offload and without a loss scale.

    Raises:
        RuntimeError: the optimizer is another one, or this version of DeepSpeed does not clip with these methods.
    """
    replaced: dict[str, Callable[..., Any]] = {"get_grad_norm_direct": gradient_norm, "unscale_and_clip_grads": clip}
    known = isinstance(optimizer, DeepSpeedZeroOptimizer) and all(hasattr(optimizer, name) for name in replaced)
    if not known:
        raise RuntimeError(
            f"deepspeed.async_update=true does not support {type(optimizer).__name__} of DeepSpeed "
            f"{deepspeed.__version__}: set deepspeed.async_update=false"
        )
    for name, function in replaced.items():
        setattr(optimizer, name, MethodType(function, optimizer))


def gradient_norm(optimizer: Any, gradients: Iterable[Tensor], parameters: object, norm_type: float = 2) -> Tensor:
    """Return the L2 norm of the gradients of a group over all ranks; a collective.

    DeepSpeed replaces a norm that is infinite or no number by -1 here. This does not.

    Args:
        optimizer: a DeepSpeedZeroOptimizer.
        gradients: the partition of this rank, any shapes.
        parameters: not used.
        norm_type: 2.

    Returns:
        A scalar in fp32.
    """
    tensors = list(gradients)
    total = _sum_of_squares(tensors, norm_type) if tensors else torch.zeros((), device=optimizer.device)
    comm.all_reduce(total, group=optimizer.dp_process_group)
    return total.sqrt()


def _sum_of_squares(tensors: list[Tensor], norm_type: float) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors, norm_type, dtype=torch.float32)).square().sum()


def clip(optimizer: Any, gradients: Iterable[Tensor], norm: Tensor) -> None:
    """Scale the gradients in place, so that their norm is at most ``optimizer.clip_grad``; 0: no limit.

    Args:
        optimizer: a DeepSpeedZeroOptimizer.
        gradients: flat gradients of this rank.
        norm: norm over all ranks and groups, a scalar.
    """
    if optimizer.clip_grad:
        factor = 1.0 / ((norm + EPSILON) / optimizer.clip_grad).clamp(min=1.0)
        for gradient in gradients:
            gradient.mul_(factor)

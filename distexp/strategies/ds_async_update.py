"""Clipping of ZeRO stages 1 and 2 without waits for the GPU, for ``deepspeed.async_update``.

DeepSpeed computes the norm of the gradients with two kernels for each parameter, and reads it twice for each group of
parameters. So the CPU starts the kernels of an update after the GPU has finished the backward pass, and the GPU waits
for them. Here one kernel computes the norms of all parameters, and the CPU reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from deepspeed import comm
from torch import Tensor

EPSILON = 1e-6
"""Added to the norm before clipping, as DeepSpeed does."""


def avoid_waits(optimizer: Any) -> None:
    """Replace the clipping of a DeepSpeedZeroOptimizer without offload and without a loss scale."""
    optimizer.get_grad_norm_direct = MethodType(gradient_norm, optimizer)
    optimizer.unscale_and_clip_grads = MethodType(clip, optimizer)


def gradient_norm(optimizer: Any, gradients: Iterable[Tensor], parameters: object, norm_type: float = 2) -> Tensor:
    """Return the L2 norm of the gradients of a group over all ranks; a collective.

    DeepSpeed replaces an infinite norm by -1 here, and by infinity again when it combines the groups.

    Args:
        optimizer: a DeepSpeedZeroOptimizer.
        gradients: the partition of this rank, any shapes.
        parameters: not used.
        norm_type: 2.

    Returns:
        A scalar in fp32.
    """
    norms = torch._foreach_norm(list(gradients), norm_type, dtype=torch.float32)
    total = torch.stack(norms).square().sum() if norms else torch.zeros((), device=optimizer.device)
    comm.all_reduce(total, group=optimizer.dp_process_group)
    return total.sqrt()


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

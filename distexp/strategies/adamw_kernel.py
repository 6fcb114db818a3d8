"""AdamW for many weights in one Triton kernel, which also scales the gradients and casts the new weights.

With separate kernels for the cast of bf16 gradients, clipping, AdamW and the copies of the weights, a GPU reads and
writes 52 bytes per weight. This kernel reads and writes 28, and the norm of the gradients needs 2 more. The weights are
cut into chunks, one for each program of the kernel. A program finds its tensors by their addresses. Only an update
imports this module, because Triton decides at its import whether it compiles or interprets kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from distexp.strategies.optimizer import WeightUpdate

CHUNK = 8192
"""Weights that one program updates. On an H200, 4,096 to 65,536 take the same time within 4 %."""

BLOCK = 1024
"""Weights that a program updates at a time. On an H200, 4,096 take twice the time."""


def update_weights(updates: Sequence[WeightUpdate], scale: Tensor) -> None:
    """Multiply the gradients by ``scale`` (fp32, shape ()), update the weights by AdamW, and set the copies.

    The formula is that of ``torch.optim.AdamW``. The gradients are not changed.
    """
    groups: dict[tuple[bool, bool, bool], list[WeightUpdate]] = defaultdict(list)
    for update in updates:
        half = update.gradient.dtype == torch.bfloat16
        groups[half, update.copy is not None, update.is_aligned()].append(update)
    for (half, has_copy, aligned), group in groups.items():
        chunks = _chunks(tuple(update.weight.numel() for update in group), scale.device)
        adamw_kernel[(len(chunks),)](
            chunks,
            _to_device([update.addresses() for update in group], torch.int64, scale.device),
            _to_device([update.constants() for update in group], torch.float32, scale.device),
            scale,
            half_gradient=half,
            has_copy=has_copy,
            aligned=aligned,
            chunk_size=CHUNK,
            block_size=BLOCK,
        )


@lru_cache(maxsize=16)
def _chunks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return weight, first index and size of the weight for each chunk, shape (chunks, 3)."""
    rows = []
    for number, size in enumerate(sizes):
        starts = torch.arange(0, size, CHUNK)
        rows.append(torch.stack([torch.full_like(starts, number), starts, torch.full_like(starts, size)], dim=1))
    return torch.cat(rows).to(device)


def _to_device(rows: list[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a table on the device. The CPU does not wait for a copy to a GPU."""
    on_gpu = device.type == "cuda"
    return torch.tensor(rows, dtype=dtype, pin_memory=on_gpu).to(device, non_blocking=True)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def adamw_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917 (triton)
    chunks, addresses, constants, scale_address,
    half_gradient: tl.constexpr, has_copy: tl.constexpr, aligned: tl.constexpr, chunk_size: tl.constexpr,
    block_size: tl.constexpr,
):  # fmt: skip
    """Update one chunk of one weight.

    Args:
        chunks: weight, first index and size of the weight for each chunk, shape (chunks, 3).
        addresses: of ``WeightUpdate.addresses``, shape (weights, 5).
        constants: of ``WeightUpdate.constants``, shape (weights, 6).
        aligned: whether all addresses are multiples of 16.
    """
    chunk = chunks + 3 * tl.program_id(0)
    number = tl.load(chunk)
    start = tl.multiple_of(tl.load(chunk + 1), chunk_size)
    size = tl.load(chunk + 2)
    address = addresses + 5 * number
    weights = tl.load(address).to(tl.pointer_type(tl.float32))
    if half_gradient:
        gradients = tl.load(address + 1).to(tl.pointer_type(tl.bfloat16))
    else:
        gradients = tl.load(address + 1).to(tl.pointer_type(tl.float32))
    means = tl.load(address + 2).to(tl.pointer_type(tl.float32))
    squares = tl.load(address + 3).to(tl.pointer_type(tl.float32))
    copies = tl.load(address + 4).to(tl.pointer_type(tl.bfloat16))
    if aligned:
        weights = tl.multiple_of(weights, 16)
        gradients = tl.multiple_of(gradients, 16)
        means = tl.multiple_of(means, 16)
        squares = tl.multiple_of(squares, 16)
        copies = tl.multiple_of(copies, 16)
    constant = constants + 6 * number
    decay = tl.load(constant)
    step_size = tl.load(constant + 1)
    correction = tl.load(constant + 2)
    beta1 = tl.load(constant + 3)
    beta2 = tl.load(constant + 4)
    eps = tl.load(constant + 5)
    scale = tl.load(scale_address)
    for offset in range(0, chunk_size, block_size):
        indices = start + offset + tl.arange(0, block_size)
        inside = indices < size
        gradient = tl.load(gradients + indices, inside, other=0.0).to(tl.float32) * scale
        mean = tl.load(means + indices, inside, other=0.0)
        square = tl.load(squares + indices, inside, other=0.0)
        weight = tl.load(weights + indices, inside, other=0.0) * decay
        mean = mean + (gradient - mean) * (1 - beta1)
        square = square * beta2 + gradient * gradient * (1 - beta2)
        weight = weight - step_size * mean / (tl.sqrt(square) / correction + eps)
        tl.store(means + indices, mean, inside)
        tl.store(squares + indices, square, inside)
        tl.store(weights + indices, weight, inside)
        if has_copy:
            tl.store(copies + indices, weight.to(tl.bfloat16), inside)

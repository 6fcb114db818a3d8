"""The optimizer of ``train.fused_update``: clipping, AdamW and the cast of the weights in one kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from distexp.config import TrainConfig
from distexp.strategies.ddp_reduction import StepWeights
from distexp.strategies.optimizer import clipping_scale, gradient_norm, parameter_groups


class FusedAdamW(torch.optim.AdamW):
    """AdamW with the states and checkpoints of torch's, which updates all weights on a GPU by one kernel.

    A weight without a gradient has that of its 16-bit copy. ``distexp.plan`` replaces the function ``update``.
    """

    def __init__(self, groups: list[dict[str, Any]], copies: StepWeights | None, **options: Any) -> None:
        super().__init__(groups, **options)
        self.copies = copies
        self.update: Callable[[Sequence[WeightUpdate], Tensor], None] = _update_on_gpu

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights without clipping, as torch does to make the states for a checkpoint."""
        updates = list(self._updates())
        if updates:
            self.update(updates, torch.ones((), device=updates[0].weight.device))

    @torch.no_grad()
    def clip_and_step(self, limit: float | None) -> Tensor:
        """Scale the gradients to a norm of at most ``limit``, update the weights, and return the norm before."""
        updates = list(self._updates())
        norm = gradient_norm([update.gradient for update in updates]).to(torch.float32)
        scale = torch.ones_like(norm) if limit is None else clipping_scale(norm, limit)
        self.update(updates, scale)
        return norm

    def _updates(self) -> Iterator[WeightUpdate]:
        """Count the step of each weight that has a gradient, and yield what to do."""
        for group in self.param_groups:
            constants = {"weight_decay": group["weight_decay"], "betas": group["betas"], "eps": group["eps"]}
            for weight in group["params"]:
                copy = None if self.copies is None else self.copies.copy_of(weight)
                gradient = weight.grad if weight.grad is not None or copy is None else copy.grad
                if gradient is not None:
                    state = self._state_of(weight)
                    state["step"] += 1
                    yield WeightUpdate(
                        weight, _like(gradient, weight), state["exp_avg"], state["exp_avg_sq"], copy,
                        learning_rate=float(group["lr"]), step=state["step"], **constants,
                    )  # fmt: skip

    def _state_of(self, weight: nn.Parameter) -> dict[str, Any]:
        """Return the states of a weight, with zeros before its first step; they are named as in torch's AdamW."""
        state: dict[str, Any] = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        return state


def fused_adamw(model: nn.Module, train: TrainConfig, copies: StepWeights | None) -> FusedAdamW:
    """Build the optimizer of a model that has its fp32 weights; the loop sets the learning rate before each step."""
    beta1, beta2 = train.betas
    groups = parameter_groups(model, train.weight_decay)
    return FusedAdamW(groups, copies, lr=train.learning_rate, betas=(beta1, beta2), eps=train.eps)


def _like(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return a gradient in the layout of its weight."""
    if gradient.stride() == weight.stride():
        return gradient
    return torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)


def _update_on_gpu(updates: Sequence[WeightUpdate], scale: Tensor) -> None:

    update_weights(updates, scale)


# AdamW for many weights in one Triton kernel, which also scales the gradients and casts the new weights. With separate
# kernels for the cast of bf16 gradients, clipping, AdamW and the copies of the weights, a GPU reads and writes 52 bytes
# per weight. This kernel reads and writes 28, and the norm of the gradients needs 2 more. The weights are cut into
# chunks, one for each program of the kernel. A program finds its tensors by their addresses.

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


# What an optimizer step does to one weight, for the kernel of ``train.fused_update``.

ALIGNMENT = 16
"""Bytes that a GPU loads at once for a thread, if the address is a multiple of it."""


@dataclass(frozen=True)
class WeightUpdate:
    """The tensors of one weight, which have the same shape and strides, and the constants of AdamW in this step."""

    weight: Tensor  # fp32; is changed
    gradient: Tensor  # fp32 or bf16, before clipping
    exp_avg: Tensor  # mean of the gradients, fp32; is changed
    exp_avg_sq: Tensor  # mean of their squares, fp32; is changed
    copy: Tensor | None  # becomes the rounded weight, bf16; None: there is no copy
    learning_rate: float
    weight_decay: float  # of AdamW, before it is multiplied by the learning rate
    betas: tuple[float, float]  # factors of the old means
    eps: float  # is added to the root of the mean square
    step: Tensor  # number of this step, from 1 on, on the CPU, shape ()

    def addresses(self) -> list[int]:
        """Return the addresses of the tensors, in the order of the kernel."""
        copy = self.weight if self.copy is None else self.copy
        return [each.data_ptr() for each in (self.weight, self.gradient, self.exp_avg, self.exp_avg_sq, copy)]

    def is_aligned(self) -> bool:
        """Return whether a GPU can load several values of each tensor at once."""
        return all(address % ALIGNMENT == 0 for address in self.addresses())

    def constants(self) -> list[float]:
        """Return the constants of the formula, in the order of the kernel."""
        (beta1, beta2), step = self.betas, float(self.step)
        decay = 1 - self.learning_rate * self.weight_decay
        step_size = self.learning_rate / (1 - beta1**step)
        return [decay, step_size, (1 - beta2**step) ** 0.5, beta1, beta2, self.eps]

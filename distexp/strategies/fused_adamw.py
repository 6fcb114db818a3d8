"""The optimizer of ``train.fused_update``: clipping, AdamW and the cast of the weights in one kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
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
                    state: dict[str, Any] = self.state[weight]
                    if not state:  # named as in torch's AdamW
                        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
                    state["step"] += 1
                    yield WeightUpdate(
                        weight, _like(gradient, weight), state["exp_avg"], state["exp_avg_sq"], copy,
                        learning_rate=float(group["lr"]), step=state["step"], **constants,
                    )  # fmt: skip


def fused_adamw(model: nn.Module, train: TrainConfig, copies: StepWeights | None) -> FusedAdamW:
    """Build the optimizer of a model that has its fp32 weights; the loop sets the learning rate before each step."""
    beta1, beta2 = train.betas
    groups = parameter_groups(model, train.weight_decay)
    return FusedAdamW(groups, copies, lr=train.learning_rate, betas=(beta1, beta2), eps=train.eps)


def _like(gradient: Tensor, weight: Tensor) -> Tensor:
    if gradient.stride() == weight.stride():
        return gradient
    return torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)


def _update_on_gpu(updates: Sequence[WeightUpdate], scale: Tensor) -> None:
    from distexp.strategies.adamw_kernel import update_weights

    update_weights(updates, scale)


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

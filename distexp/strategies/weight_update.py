"""What an optimizer step does to one weight, for the kernel of ``train.fused_update``."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

ALIGNMENT = 16
"""Bytes that a GPU loads at once for a thread, if the address is a multiple of it."""


@dataclass(frozen=True)
class WeightUpdate:
    """The tensors of one weight, which have the same shape and strides, and the constants of AdamW in this step.

    Attributes:
        weight: fp32; is changed.
        gradient: fp32 or bf16, before clipping.
        exp_avg: mean of the gradients, fp32; is changed.
        exp_avg_sq: mean of their squares, fp32; is changed.
        copy: becomes the rounded weight, bf16; None: there is no copy.
        learning_rate: of this step.
        weight_decay: of AdamW, before it is multiplied by the learning rate.
        betas: factors of the old means.
        eps: is added to the root of the mean square.
        step: number of this step, from 1 on, on the CPU, shape ().
    """

    weight: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    copy: Tensor | None
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    step: Tensor

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

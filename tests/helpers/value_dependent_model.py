"""Custom models that cannot be traced: their shapes or decisions depend on values, or an operator needs values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from distexp.config import ModelConfig

LIBRARY = torch.library.Library("distexp_tests", "DEF")
LIBRARY.define("positive_mean(Tensor images) -> Tensor")
LIBRARY.impl("positive_mean", lambda images: images.clamp(min=0).mean(), "CPU")  # as a compiled extension does it


class PositiveMean(nn.Module):
    """A model of the mean of the positive pixels."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(1, classes)

    def positive_mean(self, images: Tensor) -> Tensor:
        """Return the mean with a tensor whose shape depends on values."""
        return torch.masked_select(images, images > 0).mean()

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch."""
        return self.head(self.positive_mean(images).expand(len(images), 1))  # type: ignore[no-any-return]


class Deciding(PositiveMean):
    """The same by a decision in Python."""

    def positive_mean(self, images: Tensor) -> Tensor:
        """Return the mean of the images, at least 0."""
        mean = images.mean()
        return mean if mean.item() > 0 else torch.zeros_like(mean)


class WithOperator(PositiveMean):
    """The same by a custom operator without a kernel for fake tensors."""

    def positive_mean(self, images: Tensor) -> Tensor:
        """Return the mean that the operator computes."""
        mean: Tensor = torch.ops.distexp_tests.positive_mean(images)
        return mean


def build(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build the model whose shapes depend on values."""
    return PositiveMean(num_classes)


def build_deciding(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build the model that decides."""
    return Deciding(num_classes)


def build_with_operator(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build the model with the custom operator."""
    return WithOperator(num_classes)

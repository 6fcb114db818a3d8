"""Image models without repeated blocks, used as a custom package: ``model._target_=flat_model.NAME``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from distexp.config import ModelConfig


class FlatModel(nn.Module):
    """A model from images (samples, 3, 32, 32) to logits (samples, classes)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(3 * 8 * 8, 32)
        self.head = nn.Linear(32, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch."""
        pooled = nn.functional.avg_pool2d(images, 4).flatten(1)
        logits: Tensor = self.head(nn.functional.relu(self.hidden(pooled)))
        return logits


class RenamedInputs(FlatModel):
    """A model whose argument does not have the name of the dataset's input."""

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits of a batch."""
        return super().forward(pixels)


class CenteredInputs(FlatModel):
    """A model that subtracts a buffer from its images."""

    mean: Tensor

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.register_buffer("mean", torch.full((1, 3, 1, 1), 0.5))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch."""
        return super().forward(images - self.mean)


def build(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build the model."""
    return FlatModel(num_classes)


def build_renamed(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build the model whose argument has another name."""
    return RenamedInputs(num_classes)


def build_centered(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build the model with a buffer."""
    return CenteredInputs(num_classes)


def build_frozen(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build the model without a weight to train."""
    return FlatModel(num_classes).requires_grad_(False)

"""A GPT whose positions are not trained, used as a custom package: ``model._target_=frozen_gpt.build``."""

from __future__ import annotations

from torch import nn

from distexp.config import ModelConfig
from distexp.models import gpt


def build(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build the model."""
    built = gpt.build(model, num_classes)
    built.positions.requires_grad_(False)
    return built

"""A GPT whose gradients are all zero, used as ``model._target_=tests.helpers.detached_gpt.build``."""

from __future__ import annotations

from typing import Any

from torch import nn

from distexp.config import ModelConfig
from distexp.models import gpt


def build(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build the model."""
    built = gpt.build(model, num_classes)
    forward = built.forward

    def detached(*args: Any, **kwargs: Any) -> Any:
        logits = forward(*args, **kwargs)
        return logits.detach() + 0 * logits

    built.forward = detached
    return built

"""GPTs with a finite loss whose gradients are all zero, or NaN: ``model._target_=tests.helpers.detached_gpt.build``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from distexp.config import ModelConfig
from distexp.models import gpt


def build(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build a model whose gradients are zero."""
    return _with_output(gpt.build(model, num_classes), lambda logits: logits.detach() + 0 * logits)


def build_nan(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build a model whose gradients are NaN: the root has an infinite derivative at zero."""
    return _with_output(gpt.build(model, num_classes), lambda logits: logits + (0 * logits).sqrt())


def _with_output(built: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    forward = built.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(forward(*args, **kwargs))

    built.forward = changed
    return built

"""BLOOM with a rank that sleeps in each forward pass of the training, to inject a straggler."""

from __future__ import annotations

import os
import time

from torch import nn

from distexp.config import ModelConfig
from distexp.models import bloom

SLOW_RANK = 1
SLEEP_S, LONG_SLEEP_S = 0.02, 0.4


def build(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build the model; on the slow rank its last block sleeps 20 ms."""
    return _build(model, num_classes, SLEEP_S)


def build_slower(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build the model; on the slow rank its last block sleeps 400 ms."""
    return _build(model, num_classes, LONG_SLEEP_S)


def _build(model: ModelConfig, num_classes: int, seconds: float) -> nn.Module:
    built: nn.Module = bloom.build(model, num_classes)
    if int(os.environ["RANK"]) == SLOW_RANK:
        last = list(built.modules())[-1]
        last.register_forward_pre_hook(lambda module, _: time.sleep(seconds) if module.training else None)
    return built

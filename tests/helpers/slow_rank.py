"""A model that sleeps 20 ms in each forward pass of the training on one rank, to inject a straggler."""

from __future__ import annotations

import os
import time
from typing import Any

from torch import nn

from distexp.config import ModelConfig
from distexp.models import bloom

SLOW_RANK = 1
SLEEP_S = 0.02


def build(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build the bloom model; on the slow rank its last block sleeps."""
    built = bloom.build(model, num_classes)
    if int(os.environ["RANK"]) == SLOW_RANK:
        list(built.modules())[-1].register_forward_pre_hook(sleep)
    return built


def sleep(module: nn.Module, arguments: Any) -> None:
    """Wait 20 ms if the module trains."""
    if module.training:
        time.sleep(SLEEP_S)

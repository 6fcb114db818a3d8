"""BLOOM with a rank that is slower than the others: ``model._target_=tests.helpers.sleeping_model.build``."""

from __future__ import annotations

import os
import time
from typing import Any

from torch import nn

from distexp.config import ModelConfig
from distexp.models import bloom

SLOW_RANK, SLEEP_S = 1, 0.4


def build(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build the model; on the slow rank each forward pass of a training first sleeps."""
    built: nn.Module = bloom.build(model, num_classes)
    if int(os.environ["RANK"]) == SLOW_RANK:
        built.register_forward_pre_hook(_sleep)
    return built


def _sleep(module: nn.Module, inputs: Any) -> None:
    if module.training:
        time.sleep(SLEEP_S)

"""Start of the measurements that need the distributed model: memory, waits for other ranks, and the profile."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from distexp.strategies.model_tensors import read_model_tensors
from distexp.training.metrics_logger import MetricsLogger


def watch_model(module: nn.Module, optimizer: Any, logger: MetricsLogger) -> None:
    """Let a metrics logger measure a distributed model. Call it before the first step.

    Args:
        module: the wrapped module.
        optimizer: torch's optimizer, or what wraps it; None if there is none.
        logger: the metrics logger of this rank.
    """
    logger.parts.read = partial(read_model_tensors, module, optimizer)
    logger.waits.follow(module)
    logger.profiler.module = module

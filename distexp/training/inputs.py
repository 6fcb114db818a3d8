"""The inputs of a training: what every trainer gets in addition to the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distexp.data.loader import ShardedLoader
    from distexp.models.blueprint import Blueprint
    from distexp.training.metrics_logger import MetricsLogger
    from distexp.training.schedule import StepPlan

ModelFactory = Callable[[], "Blueprint"]
"""Returns the model before it is distributed."""


@dataclass(frozen=True)
class TrainingInputs:
    """Data loaders, step plan and metrics logger of one training."""

    training: ShardedLoader
    evaluation: ShardedLoader
    plan: StepPlan
    logger: MetricsLogger
    run_id: str  # the run that the checkpoints belong to

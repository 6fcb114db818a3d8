"""The inputs of a training: what every trainer gets in addition to the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distexp.config import TrainConfig
from distexp.measure.profiling.intervals import ProfileWindow

if TYPE_CHECKING:
    from distexp.data.loader import ShardedLoader
    from distexp.models.blueprint import Blueprint
    from distexp.training.metrics_logger import MetricsLogger

ModelFactory = Callable[[], "Blueprint"]  # returns the model before it is distributed


@dataclass(frozen=True)
class TrainingInputs:
    """Data loaders, step plan and metrics logger of one training."""

    training: ShardedLoader
    evaluation: ShardedLoader
    plan: StepPlan
    logger: MetricsLogger
    run_id: str  # the run that the checkpoints belong to


@dataclass(frozen=True)
class StepPlan:
    """The steps of a training, by epoch."""

    train: TrainConfig
    steps_per_epoch: int

    @property
    def total_steps(self) -> int:
        """Return the number of optimizer steps of the whole training."""
        steps = self.train.num_epochs * self.steps_per_epoch
        return min(steps, self.train.max_steps or steps)

    def epochs(self, done: int, finished: int = 0) -> range:
        """Return the epochs that still have a step or an evaluation, after some finished epochs with their evaluation.

        A checkpoint after the last step of an epoch may have been written before or after the end of that epoch.
        """
        whole = min(finished, done // self.steps_per_epoch)
        first = max(whole, max(done - 1, 0) // self.steps_per_epoch)
        return range(first, -(-self.total_steps // self.steps_per_epoch))

    def steps_of(self, epoch: int, done: int) -> range:
        """Return the steps of an epoch that are left after ``done`` steps, counted from the first step of the epoch."""
        before = epoch * self.steps_per_epoch
        return range(max(0, done - before), min(self.steps_per_epoch, self.total_steps - before))

    def profile_window(self, done: int) -> ProfileWindow | None:
        """Return the steps to profile after ``done`` steps; None if no step can be profiled."""
        return ProfileWindow.of(self.train, total=self.total_steps, per_epoch=self.steps_per_epoch, done=done)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0. All schedules warm up over ``warmup_steps``."""
        train = self.train
        if step < train.warmup_steps:
            return train.learning_rate * step / train.warmup_steps
        left = max(0.0, (self.total_steps - step) / max(1, self.total_steps - train.warmup_steps))
        if train.schedule == "linear":  # as the Hugging Face Trainer does by default
            return train.learning_rate * left
        if train.schedule == "cosine":  # half a period, as in arXiv:1608.03983 without restarts
            return train.learning_rate * (1 - math.cos(math.pi * left)) / 2
        if train.schedule == "step":  # as torch's StepLR
            return float(train.learning_rate * train.gamma ** (step // self.steps_per_epoch // train.step_size))
        return train.learning_rate

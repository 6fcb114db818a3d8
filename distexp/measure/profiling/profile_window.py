"""The steps of a training that are profiled."""

from __future__ import annotations

from dataclasses import dataclass

from distexp.config import TrainConfig

WARMUP_STEPS = 1
"""Steps before the profiled ones; they contain the start-up cost of the profiler."""


@dataclass(frozen=True)
class ProfileWindow:
    """The steps that are profiled: the last ones of a training, after the profiler's warm-up."""

    steps_before: int  # steps before the profiler's warm-up
    steps: int

    @classmethod
    def of(cls, train: TrainConfig, *, total: int, per_epoch: int, done: int) -> ProfileWindow | None:
        """Return the window, or None if no step can be profiled.

        The window has ``train.profile_steps`` steps, or fewer: At least half of the steps after
        ``measure_after_step`` remain unprofiled, and no evaluation is between two profiled steps.

        Args:
            train: Training options.
            total: Steps of the training.
            per_epoch: Steps per epoch.
            done: Steps already done when this process resumed.
        """
        measurable = total - done - train.measure_after_step
        in_last_epoch = total - (total - 1) // per_epoch * per_epoch
        steps = min(train.profile_steps, measurable // 2 - WARMUP_STEPS, in_last_epoch - WARMUP_STEPS - 1)
        return cls(total - steps - WARMUP_STEPS, steps) if steps >= 1 else None

"""A watcher: one measurement that accompanies a training. ``distexp.training.watchers`` has the list of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import nn

from distexp.measure.memory.model_tensors import ReadTensors

PROFILE, TRAIN, WARMUP = "profile", "train", "warmup"
"""Phases of the steps. Only those of ``train`` count for the speed."""


class Step(NamedTuple):
    """A training step that has ended."""

    number: int  # from 1, with the steps of earlier attempts
    measured: bool  # whether it counts for the speed
    next_measured: bool  # whether the next step counts too, and follows directly


@dataclass(frozen=True)
class MeasuredSteps:
    """The steps of this attempt that count for the speed, on this rank.

    Attributes:
        durations_s: Duration of each step.
        data_waits_s: Time that this rank waited for the data of each step.
        sizes_differ: Whether the batches of some rank have different sizes.
    """

    durations_s: Sequence[float]
    data_waits_s: Sequence[float]
    sizes_differ: bool


class Watcher:
    """Base class of a watcher. The methods are called on every rank in this order, and do nothing by default.

    A method that a class does not define costs nothing, so a watcher of a whole training costs nothing per step. The
    CPU is ahead of the GPU: a method that waits for the GPU slows down every step.

    Attributes:
        section: Where the summary is in the record: ``metrics`` or ``memory``, whose fields it must have, or
            ``metrics.watchers``.
        overhead_s: Seconds that the watcher took so far and that do not belong to the duration of the training.
    """

    section: ClassVar[str] = "metrics.watchers"
    overhead_s: float = 0.0

    def follow(self, module: nn.Module, read: ReadTensors) -> None:
        """Prepare for a distributed model, which has just been built. ``read`` returns its tensors on this rank."""

    def start(self, done: int) -> None:
        """Start to measure: the first step follows, after so many steps of earlier attempts."""

    def start_steps(self, phase: str) -> None:
        """Prepare for steps of a phase that follow anything else, such as an evaluation or a checkpoint."""

    def start_forward(self) -> None:
        """Prepare for the forward pass of a micro-batch."""

    def before_update(self) -> None:
        """Measure between the last backward pass of a step and the update of the weights."""

    def end_step(self, step: Step) -> None:
        """Measure at the end of a step, before the clock reads its duration."""

    def after_step(self, step: Step) -> None:
        """Measure after a step. This time belongs to the next step."""

    def stop(self) -> None:
        """End the measurement. Called after the last step or after an error, perhaps several times."""

    def summary(self, steps: MeasuredSteps) -> Mapping[str, Any]:
        """Return the values for the record, as JSON. All ranks call it, and the values of rank 0 are kept."""
        return {}

"""Losses of a run by step, and whether the curves of two runs coincide or overlap."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from distexp.report.traces import RunTrace
from distexp.runs.entry_values import number_of
from distexp.runs.record import RunRecord
from distexp.statistics.same_training import whole_training_bound

MIN_SPAN = 0.2  # of an axis, relative to the losses; a smaller one would make small differences look large
OVERLAPPING = 0.02  # distance of two curves, relative to the axis

Losses = dict[int, float]
"""Loss by step."""


@dataclass(frozen=True)
class LossCurve:
    """Training and evaluation losses of a run.

    Attributes:
        invalid: Steps whose training loss is no finite number.
    """

    trace: RunTrace
    training: Losses
    evaluation: Losses
    invalid: frozenset[int] = frozenset()

    @classmethod
    def of(cls, trace: RunTrace) -> LossCurve:
        """Return the losses of a trace."""
        losses = {entry["step"]: number_of(entry, "loss") for entry in trace.steps}
        training = {step: loss for step, loss in losses.items() if loss is not None and math.isfinite(loss)}
        return cls(trace, training, _evaluation_losses(trace), frozenset(losses.keys() - training.keys()))

    @property
    def steps(self) -> set[int]:
        """Steps that the run logged."""
        return self.training.keys() | self.invalid

    @property
    def name(self) -> str:
        """Label of the run."""
        return self.trace.name

    @property
    def tolerance(self) -> float:
        """Largest relative difference to a run of the same training."""
        return whole_training_bound(self.trace.row.settings["precision"])


def _evaluation_losses(trace: RunTrace) -> Losses:
    """Return the evaluation loss after each epoch. A training cut short evaluates at its last step."""
    metrics = trace.row.record.metrics
    if not metrics.steps_per_epoch:
        return {}
    first = _first_evaluated_epoch(trace.row.record)
    steps = (epoch * metrics.steps_per_epoch for epoch in range(first, first + len(metrics.eval_losses)))
    last = metrics.total_steps
    return {min(step, last or step): loss for step, loss in zip(steps, metrics.eval_losses, strict=True)}


def _first_evaluated_epoch(record: RunRecord) -> int:
    """Return the first epoch with an evaluation, from 1. A resumed training may have changed ``train.evaluate``."""
    if not (record.config.get("train") or {}).get("evaluate", True):
        return 1
    return max(len(record.metrics.train_losses) - len(record.metrics.eval_losses), 0) + 1


def relative_differences(losses: Losses, baseline: Losses) -> Losses:
    """Return the differences at the steps that both have, relative to the larger loss."""
    return {
        step: (losses[step] - baseline[step]) / max(abs(losses[step]), abs(baseline[step]), 1e-12)
        for step in sorted(losses.keys() & baseline.keys())
    }


def largest_difference(one: LossCurve, other: LossCurve) -> tuple[float, int]:
    """Return the largest relative difference of training losses and its step; 0 and 0 without common steps."""
    differences = relative_differences(one.training, other.training)
    sizes = ((abs(difference), step) for step, difference in differences.items())
    return max(sizes, key=lambda size: size[0], default=(0.0, 0))


def all_coincide(curves: Sequence[LossCurve]) -> bool:
    """Return whether all curves have common steps, and differ by no more than their tolerance."""
    return all(_coincide(*pair) for pair in combinations(curves, 2))


def _coincide(one: LossCurve, other: LossCurve) -> bool:
    has_common_steps = bool(one.training.keys() & other.training.keys())
    return has_common_steps and largest_difference(one, other)[0] <= max(one.tolerance, other.tolerance)


def any_overlap(curves: Sequence[LossCurve]) -> bool:
    """Return whether two curves look like one, at most of their steps."""
    low, high = loss_range(curves)
    return any(_distance(*pair) < OVERLAPPING * (high - low) for pair in combinations(curves, 2))


def _distance(one: LossCurve, other: LossCurve) -> float:
    """Return how far apart two lines are, or the marks of their evaluations if these are closer."""
    return min(
        _median_distance(one.training, other.training),
        _median_distance(one.evaluation, other.evaluation),
    )


def _median_distance(one: Losses, other: Losses) -> float:
    gaps = [abs(one[step] - other[step]) for step in one.keys() & other.keys()]
    return statistics.median(gaps) if gaps else math.inf


def loss_range(curves: Sequence[LossCurve]) -> tuple[float, float]:
    """Return the range of an axis for all losses, at least MIN_SPAN of the largest wide."""
    values = [loss for curve in curves for losses in (curve.training, curve.evaluation) for loss in losses.values()]
    low, high = min(values), max(values)
    missing = MIN_SPAN * max(abs(low), abs(high)) - (high - low)
    return (low, high) if missing <= 0 else (low - missing / 2, high + missing / 2)

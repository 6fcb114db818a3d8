"""Losses of runs by step, and whether runs trained the same model: their losses agree at each logged step."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from distexp.report.data.overview import Overview
from distexp.report.data.run_settings import global_batch, is_environment_setting, is_strategy_option, task_name
from distexp.report.traces import RunTrace, load_losses
from distexp.statistics.same_training import whole_training_bound
from distexp.system.typed_values import number_of

NOT_THE_MODEL = frozenset(
    {"strategy", "offload", "engine", "device", "nodes", "workers"}
    | {"micro_batch_size", "gradient_accumulation_steps", "global_batch_size", "eval_batch_size"}
    | {"measure_after_step"}
)
"""Settings that distribute a training and should not change its losses, if the global batch is the same."""


DROPOUT = "With dropout, strategies draw other random numbers. To compare them, set model.dropout=0."
MIN_SPAN = 0.2  # of an axis, relative to the losses; a smaller one would make small differences look large
OVERLAPPING = 0.02  # distance of two curves, relative to the axis
Losses = dict[int, float]  # loss by step


def describe_same_training(overview: Overview) -> Iterator[str]:
    """Yield which runs trained the same model. Of many runs, only the most informative ones are compared."""
    curves = [LossCurve.of(trace) for trace in load_losses(overview)]
    sentences = list(compare_losses([curve for curve in curves if curve.training]))
    yield from sentences
    if sentences and len(curves) < len(overview.groups):
        yield f"Losses were compared for {len(curves)} of {len(overview.groups)} trainings, which the report draws."


def compare_losses(curves: Sequence[LossCurve]) -> Iterator[str]:
    """Report which runs trained the same model: at each logged step their losses agree."""
    trainings: dict[str, list[LossCurve]] = {}
    for curve in curves:
        settings = {
            name: value for name, value in curve.trace.row.settings.items()
            if name not in NOT_THE_MODEL and not is_strategy_option(name)
            and not is_environment_setting(name)
        }  # fmt: skip
        trainings.setdefault(
            json.dumps([settings, global_batch(curve.trace.row.settings)], sort_keys=True, default=str), []
        ).append(curve)
    several_tasks = len({task_name(curve.trace.row.settings) for curve in curves}) > 1
    for alike in trainings.values():
        if any(one.steps & other.steps for one, other in combinations(alike, 2)):
            yield _compare(alike, task_name(alike[0].trace.row.settings) if several_tasks else "")


def _compare(curves: Sequence[LossCurve], task: str) -> str:
    """Describe the largest difference of any two runs at a step that both logged."""
    pairs = list(combinations(curves, 2))
    batch = global_batch(curves[0].trace.row.settings)
    details = ", ".join(filter(None, [task, f"global batch {batch}" if batch else ""]))
    runs = f"{len(curves)} runs" + (f" ({details})" if details else "")
    for one, other in pairs:
        if steps := (one.invalid & other.training.keys()) | (other.invalid & one.training.keys()):
            pair = f"{one.name} and {other.name}"
            return f"Different losses: {runs}. At step {min(steps)} one of {pair} has no finite loss."
    differences = ((*largest_difference(one, other), one, other) for one, other in pairs)
    largest, step, one, other = max(differences, key=lambda difference: difference[0])
    if largest > curves[0].tolerance:
        pair = f"{one.name} and {other.name}"
        difference = f"Different losses: {runs} differ by up to {100 * largest:.2g}%, at step {step} of {pair}."
        models = [curve.trace.row.record.config.get("model") or {} for curve in curves]
        return f"{difference} {DROPOUT}" if any(model.get("dropout") for model in models) else difference
    gap = f"agree within {100 * largest:.2g}%" if largest else "are equal"
    is_complete = all(one.steps == other.steps for one, other in pairs)
    return f"Same training: losses of {runs} {gap} at every {'logged' if is_complete else 'common logged'} step."


@dataclass(frozen=True)
class LossCurve:
    """Training and evaluation losses of a run; ``invalid`` are steps whose training loss is no finite number."""

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
        """Return the steps that the run logged."""
        return self.training.keys() | self.invalid

    @property
    def name(self) -> str:
        """Return the label of the run."""
        return self.trace.name

    @property
    def tolerance(self) -> float:
        """Return the largest relative difference to a run of the same training."""
        return whole_training_bound(self.trace.row.settings["precision"])


def _evaluation_losses(trace: RunTrace) -> Losses:
    """Return the evaluation loss after each epoch. A training cut short evaluates at its last step."""
    record, metrics = trace.row.record, trace.row.record.metrics
    if not metrics.steps_per_epoch:
        return {}
    # A resumed training may have changed train.evaluate. Then the evaluations are those of the last epochs.
    evaluates = (record.config.get("train") or {}).get("evaluate", True)
    first = max(len(metrics.train_losses) - len(metrics.eval_losses), 0) + 1 if evaluates else 1
    steps = (epoch * metrics.steps_per_epoch for epoch in range(first, first + len(metrics.eval_losses)))
    last = metrics.total_steps
    return {min(step, last or step): loss for step, loss in zip(steps, metrics.eval_losses, strict=True)}


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
    return all(
        one.training.keys() & other.training.keys()
        and largest_difference(one, other)[0] <= max(one.tolerance, other.tolerance)
        for one, other in combinations(curves, 2)
    )


def any_overlap(curves: Sequence[LossCurve]) -> bool:
    """Return whether two curves look like one, at most of their steps."""
    low, high = loss_range(curves)
    pairs = list(combinations(curves, 2))
    losses = [(one.training, other.training) for one, other in pairs]
    losses += [(one.evaluation, other.evaluation) for one, other in pairs]
    return any(_median_distance(*pair) < OVERLAPPING * (high - low) for pair in losses)


def _median_distance(one: Losses, other: Losses) -> float:
    gaps = [abs(one[step] - other[step]) for step in one.keys() & other.keys()]
    return statistics.median(gaps) if gaps else math.inf


def loss_range(curves: Sequence[LossCurve]) -> tuple[float, float]:
    """Return the range of an axis for all losses, at least MIN_SPAN of the largest wide."""
    values = [loss for curve in curves for losses in (curve.training, curve.evaluation) for loss in losses.values()]
    low, high = min(values), max(values)
    missing = MIN_SPAN * max(abs(low), abs(high)) - (high - low)
    return (low, high) if missing <= 0 else (low - missing / 2, high + missing / 2)

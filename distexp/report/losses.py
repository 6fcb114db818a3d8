"""Losses of runs by step, and whether runs trained the same model: their losses agree at each logged step."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from distexp.report.data.overview import Overview
from distexp.report.data.rows import (
    global_batch,
    is_environment_setting,
    is_strategy_option,
    kernel_options,
    task_name,
)
from distexp.report.traces import RunTrace, read_losses, started_groups
from distexp.statistics.same_training import whole_training_bound
from distexp.system.typed_values import number_of

NOT_THE_MODEL = frozenset(
    {"strategy", "offload", "engine", "device", "nodes", "workers"}
    | {"micro_batch_size", "gradient_accumulation_steps", "global_batch_size", "eval_batch_size"}
    | {
        "measure_after_step",
        "activation_checkpointing",
        "activation_budget",
        "parallel",
        "kernels",
        "loss_chunk_tokens",
    }
)
"""Settings, and sections of them, that should not change the losses, if the global batch is the same.

Those of ``kernel_options`` should not either, except for an own loss.
"""


DROPOUT = "With dropout or skipped paths, strategies draw other random numbers. To compare them, set {}."
BATCH_NORMS = (
    " Batch norms, if the model has any, use the samples of one worker, and the evaluation the statistics of rank 0, "
    "as with DDP. So losses depend on the micro-batch size and on the number of workers."
)
MIN_SPAN = 0.2  # of an axis, relative to the losses; a smaller one would make small differences look large
OVERLAPPING = 0.02  # distance of two curves, relative to the axis
Losses = dict[int, float]  # loss by step


def describe_same_training(overview: Overview) -> Iterator[str]:
    """Yield which runs trained the same model. All runs with equal seeds are compared, at each logged step."""
    rows = ((group, row) for group in started_groups(overview) for row in group.counted_rows if row.path)
    curves = [curve for curve in (LossCurve.of(read_losses(overview, *one)) for one in rows) if curve.training]
    trainings: dict[str, dict[str, list[LossCurve]]] = {}
    for curve in curves:
        settings = {
            name: value for name, value in curve.trace.row.settings.items()
            if not {name, name.partition(".")[0]} & NOT_THE_MODEL and not is_strategy_option(name)
            and not is_environment_setting(name) and (name not in kernel_options() or value == "own")
        }  # fmt: skip
        seed = str(settings.pop("seed", None))
        key = json.dumps([settings, global_batch(curve.trace.row.settings)], sort_keys=True, default=str)
        trainings.setdefault(key, {}).setdefault(seed, []).append(curve)
    several_tasks = len({task_name(curve.trace.row.settings) for curve in curves}) > 1
    for by_seed in trainings.values():
        if alike := [same for same in by_seed.values() if _have_common_steps(same)]:
            yield _compare(alike, task_name(alike[0][0].trace.row.settings) if several_tasks else "")


def _have_common_steps(curves: Sequence[LossCurve]) -> bool:
    return sum(len(curve.steps) for curve in curves) > len(set().union(*(curve.steps for curve in curves)))


def _switch_off(config: Mapping[str, Any]) -> str:
    """Return what to set for a training without dropout. A custom model may not have the key ``model.dropout``."""
    model, adapter = config.get("model") or {}, config.get("adapter") or {}
    found = ["model.dropout=0" if "dropout" in model.get("keys", ["dropout"]) else "the rates of the model to 0"]
    return " and ".join(found + ["adapter.dropout=0"] * bool(adapter.get("dropout")))


def _compare(trainings: Sequence[Sequence[LossCurve]], task: str) -> str:
    """Describe the largest difference of any two runs of a training, which has one seed, at a step that both logged."""
    curves = [curve for alike in trainings for curve in alike]
    batch = global_batch(curves[0].trace.row.settings)
    seeds = f"{len(trainings)} seeds" if len(trainings) > 1 else ""
    details = ", ".join(filter(None, [task, seeds, f"global batch {batch}" if batch else ""]))
    runs = f"{len(curves)} runs" + (f" ({details})" if details else "")
    for alike in trainings:
        if found := _first_invalid(alike):
            return f"Different losses: {runs}. At step {found[0]} one of {found[1]} has no finite loss."
    built = [curve.trace.row.record.built for curve in curves]
    batch_norms = BATCH_NORMS if any(model and model.channels_last is not None for model in built) else ""
    largest, step, one, other = _widest_difference(trainings, "training")
    if largest > curves[0].tolerance:
        pair = f"{one.name} and {other.name}"
        difference = f"Different losses: {runs} differ by up to {100 * largest:.2g}%, at step {step} of {pair}."
        configs = [
            curve.trace.row.record.config for curve, model in zip(curves, built, strict=True) if model and model.dropout
        ]
        return f"{difference} {DROPOUT.format(_switch_off(configs[0]))}" if configs else difference + batch_norms
    gap = f"agree within {100 * largest:.2g}%" if largest else "are equal"
    apart, step, one, other = _widest_difference(trainings, "evaluation")
    firsts = [(next(first for first in alike if first.steps == curve.steps), curve) for alike in trainings
              for curve in alike]  # fmt: skip
    missing = [pair for pair in firsts if pair[0].evaluation.keys() ^ pair[1].evaluation.keys()]
    if missing and all(curve.trace.row.record.metrics.eval_losses for curve in curves):
        one, other = missing[0]
        return f"Different losses: {runs}. One of {one.name} and {other.name} has no finite evaluation loss."
    if apart > curves[0].tolerance:
        return (
            f"Same training losses, but other evaluation losses: {runs} {gap} in training, and differ by up to "
            f"{100 * apart:.2g}% in the evaluation at step {step} of {one.name} and {other.name}.{batch_norms}"
        )
    is_complete = all(curve.steps == alike[0].steps for alike in trainings for curve in alike)
    compared = f"Same training: losses of {runs} {gap} at every {'logged' if is_complete else 'common logged'} step."
    return f"{compared}{_describe_proofs(curves)}"


def _first_invalid(curves: Sequence[LossCurve]) -> tuple[int, str] | None:
    """Return the first step at which one run has no finite loss and another one has, and their names."""
    invalid, finite = (set().union(*(getattr(curve, kind) for curve in curves)) for kind in ("invalid", "training"))
    if not invalid & finite:
        return None
    step = min(invalid & finite)
    names = [next(curve.name for curve in curves if step in getattr(curve, kind)) for kind in ("invalid", "training")]
    return step, " and ".join(curve.name for curve in curves if curve.name in names)


def _widest_difference(trainings: Sequence[Sequence[LossCurve]], kind: str) -> tuple[float, int, LossCurve, LossCurve]:
    """Return the largest relative difference of two runs, its step and the runs: the extremes of that step."""
    found = (0.0, 0, trainings[0][0], trainings[0][0])
    for curves in trainings:
        losses: list[Losses] = [getattr(curve, kind) for curve in curves]
        for step in sorted(set().union(*losses)):
            values = {number: known[step] for number, known in enumerate(losses) if step in known}
            one, other = sorted((min(values, key=values.__getitem__), max(values, key=values.__getitem__)))
            size = abs(relative_differences({step: values[one]}, {step: values[other]})[step])
            found = max(found, (size, step, curves[one], curves[other]), key=lambda difference: difference[0])
    return found


def _describe_proofs(curves: Sequence[LossCurve]) -> str:
    """Return which trainings ``distexp verify`` has compared with that of ``single``."""
    records = {curve.name: curve.trace.row.record for curve in curves}
    needed = [name for name, each in records.items() if not (each.strategy and each.strategy.one_worker)]
    proved = [name for name in needed if records[name].run.proof]
    if not proved:
        return ""
    return f" Verified by distexp verify: {'all' if proved == needed else ', '.join(proved)}."


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
    losses = zip(steps, metrics.eval_losses, strict=True)
    return {min(step, last or step): loss for step, loss in losses if loss is not None and math.isfinite(loss)}


def relative_differences(losses: Losses, baseline: Losses) -> Losses:
    """Return the differences at the steps that both have, relative to the larger loss."""
    return {
        step: (losses[step] - baseline[step]) / max(abs(losses[step]), abs(baseline[step]), 1e-12)
        for step in sorted(losses.keys() & baseline.keys())
    }


def largest_difference(one: LossCurve, other: LossCurve, kind: str = "training") -> tuple[float, int]:
    """Return the largest relative difference of losses and its step; 0 and 0 without common steps."""
    differences = relative_differences(getattr(one, kind), getattr(other, kind))
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

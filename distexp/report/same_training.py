"""Whether runs trained the same model: their losses agree at each logged step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import combinations

from distexp.report.data.environment_settings import is_environment_setting
from distexp.report.data.overview import Overview
from distexp.report.data.setting_names import is_strategy_option
from distexp.report.data.settings import global_batch, task_name
from distexp.report.loss_curves import LossCurve, largest_difference
from distexp.report.traces import RunTrace, load_losses

NOT_THE_MODEL = frozenset(
    {"strategy", "offload", "engine", "device", "nodes", "workers"}
    | {"micro_batch_size", "gradient_accumulation_steps", "global_batch_size", "eval_batch_size"}
    | {"measure_after_step"}
)
"""Settings that distribute a training and should not change its losses, if the global batch is the same."""


DROPOUT = "With dropout, strategies draw other random numbers. To compare them, set model.dropout=0."


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
        trainings.setdefault(_training_key(curve.trace), []).append(curve)
    several_tasks = len({task_name(curve.trace.row.settings) for curve in curves}) > 1
    for alike in trainings.values():
        if any(one.steps & other.steps for one, other in combinations(alike, 2)):
            yield _compare(alike, task_name(alike[0].trace.row.settings) if several_tasks else "")


def _training_key(trace: RunTrace) -> str:
    """Return a key that is equal for runs whose losses should agree."""
    settings = {
        name: value for name, value in trace.row.settings.items()
        if name not in NOT_THE_MODEL and not is_strategy_option(name)
        and not is_environment_setting(name)
    }  # fmt: skip
    return json.dumps([settings, global_batch(trace.row.settings)], sort_keys=True, default=str)


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
        return f"{difference} {DROPOUT}" if any(map(_has_dropout, curves)) else difference
    gap = f"agree within {100 * largest:.2g}%" if largest else "are equal"
    is_complete = all(one.steps == other.steps for one, other in pairs)
    return f"Same training: losses of {runs} {gap} at every {'logged' if is_complete else 'common logged'} step."


def _has_dropout(curve: LossCurve) -> bool:
    return bool((curve.trace.row.record.config.get("model") or {}).get("dropout"))

"""Training losses over the steps, evaluation losses, and whether runs trained the same model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import combinations

from distexp.report.data.environment_settings import is_environment_setting
from distexp.report.data.overview import Overview
from distexp.report.data.setting_names import is_strategy_option
from distexp.report.data.settings import global_batch, task_name
from distexp.report.data.text import name_runs
from distexp.report.figures.base import Figure, Panel, describe_selection
from distexp.report.figures.loss_charts import draw_apart, draw_differences, draw_together, is_equal, panel_legend
from distexp.report.figures.loss_curves import LossCurve, all_coincide, any_overlap, largest_difference
from distexp.report.traces import MAX_TRACES, RunTrace

NOT_THE_MODEL = frozenset(
    {"strategy", "offload", "engine", "device", "nodes", "workers"}
    | {"micro_batch_size", "gradient_accumulation_steps", "global_batch_size", "eval_batch_size"}
    | {"log_every", "measure_after_step"}
)
"""Settings that distribute a training and should not change its losses, if the global batch is the same."""


def build_losses(overview: Overview, traces: Sequence[RunTrace]) -> Figure | None:
    """Build the figure; None if no run completed a step.

    Coinciding curves would hide each other, so their differences are drawn. Overlapping curves get a panel each.
    """
    curves = [curve for curve in map(LossCurve.of, traces) if curve.training]
    if not curves:
        return None
    caption, sentences = describe_selection(overview, traces), tuple(compare_losses(curves))
    if len(curves) > 1 and all_coincide(curves):
        return _difference_figure(overview, curves, caption, sentences)
    if len(curves) > 1 and any_overlap(curves):
        panels = tuple(draw_apart(curves))
        return Figure("losses", "Losses", panels, caption, sentences, legend=panel_legend(curves, others=True))
    return Figure("losses", "Losses", (Panel("", draw_together(curves)),), caption, sentences)


def _difference_figure(
    overview: Overview, curves: Sequence[LossCurve], caption: str, sentences: tuple[str, ...]
) -> Figure:
    baseline = next((curve for curve in curves if curve.trace.group is overview.baseline), curves[0])
    equal = [curve for curve in curves if curve is not baseline and is_equal(curve, baseline)]
    panels = tuple(draw_differences(curves, baseline))
    labels = name_runs((curve.trace.row.label for curve in equal), MAX_TRACES)
    notes = [
        f"Equal to it at every step: {labels}." if equal else "",
        "The axis of a difference is at least as wide as the tolerance." if len(panels) > 1 else "",
        caption,
    ]  # fmt: skip
    drawn = f"difference to {baseline.name}" if len(panels) > 1 else baseline.name
    return Figure(
        "losses", "Losses", panels, " ".join(filter(None, notes)), sentences,
        legend=panel_legend(curves, others=False), subtitle=f"All curves coincide; drawn: {drawn}",
    )  # fmt: skip


def compare_losses(curves: Sequence[LossCurve]) -> Iterator[str]:
    """Report which runs trained the same model: at each logged step their losses agree."""
    trainings: dict[str, list[LossCurve]] = {}
    for curve in curves:
        trainings.setdefault(_training_key(curve.trace), []).append(curve)
    several_tasks = len({task_name(curve.trace.row.settings) for curve in curves}) > 1
    for alike in trainings.values():
        if len(alike) > 1:
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
    differences = ((*largest_difference(one, other), one, other) for one, other in combinations(curves, 2))
    largest, step, one, other = max(differences, key=lambda difference: difference[0])
    batch = global_batch(curves[0].trace.row.settings)
    details = ", ".join(filter(None, [task, f"global batch {batch}" if batch else ""]))
    runs = f"{len(curves)} runs" + (f" ({details})" if details else "")
    if largest > curves[0].tolerance:
        pair = f"{one.name} and {other.name}"
        return f"Different losses: {runs} differ by up to {100 * largest:.2g}%, at step {step} of {pair}."
    gap = f"agree within {100 * largest:.2g}%" if largest else "are equal"
    return f"Same training: losses of {runs} {gap} at every logged step."

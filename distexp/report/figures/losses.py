"""Training losses over the steps, evaluation losses, and whether runs trained the same model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import altair as alt

from distexp.report.data.environment_settings import is_environment_setting
from distexp.report.data.overview import Overview
from distexp.report.data.setting_names import is_strategy_option
from distexp.report.data.settings import global_batch, task_name
from distexp.report.figures.base import Figure, Panel, describe_selection
from distexp.report.figures.theme import inline_data
from distexp.report.traces import RunTrace

EVALUATION = "evaluation loss"
SAME_LOSS = {"fp32": 1e-4, "fp16": 1e-3, "bf16": 1e-2}
"""Largest relative difference of the same training: strategies sum in different orders."""
NOT_THE_MODEL = frozenset(
    {"strategy", "offload", "engine", "device", "nodes", "workers"}
    | {"micro_batch_size", "gradient_accumulation_steps", "eval_batch_size", "log_every", "measure_after_step"}
)
"""Settings that distribute a training and should not change its losses, if the global batch is the same."""


def build_losses(overview: Overview, traces: Sequence[RunTrace]) -> Figure | None:
    """Build the figure; None if no run completed a step."""
    trained = [each for each in traces if _losses(each)]
    if not trained:
        return None
    panels = (Panel("", _draw(trained)),)
    return Figure("losses", "Losses", panels, describe_selection(overview, traces), tuple(compare_losses(trained)))


def _losses(trace: RunTrace) -> dict[int, float]:
    """Return the training losses by step."""
    return {entry["step"]: entry["loss"] for entry in trace.steps if entry.get("loss") is not None}


def _draw(traces: Sequence[RunTrace]) -> alt.LayerChart:
    """Draw a line per run, and a ring per evaluation. A click on the legend highlights a run."""
    picked = alt.selection_point(fields=["run"], bind="legend")
    encoding = {
        "x": alt.X("step:Q", title="step", axis=alt.Axis(grid=False, tickMinStep=1, tickCount=10)),
        "y": alt.Y("loss:Q", title="loss", scale=alt.Scale(zero=False)),
        "color": _run_color(traces),
        "opacity": alt.condition(picked, alt.value(0.95), alt.value(0.12)),
        "tooltip": ["run:N", "step:Q", alt.Tooltip("loss:Q", format=".4f")],
    }
    lines = [
        alt.Chart(inline_data([{"run": each.name, "step": step, "loss": loss} for step, loss in _losses(each).items()]))
        .mark_line(strokeWidth=2 + 0.7 * (len(traces) - 1 - n))  # equal curves stay visible under thinner ones
        .encode(**encoding)
        for n, each in enumerate(traces)
    ]
    scale = alt.Scale(domain=[EVALUATION], range=["circle"])
    rings = alt.Chart(inline_data([row for each in traces for row in _evaluations(each)])).mark_point(
        filled=False, size=70, strokeWidth=2
    )
    shape = alt.Shape("kind:N", scale=scale, legend=alt.Legend(title=None))
    return alt.layer(*lines, rings.encode(**encoding, shape=shape)).add_params(picked).properties(height=320)


def _run_color(traces: Sequence[RunTrace]) -> alt.Color:
    names = [each.name for each in traces]
    style = {"symbolType": "stroke", "symbolStrokeWidth": 3, "labelLimit": alt.ExprRef("width")}
    legend = alt.Legend(title=None, columns=1, **style) if len(names) > 1 else None
    return alt.Color("run:N", scale=alt.Scale(domain=names), legend=legend)


def _evaluations(trace: RunTrace) -> Iterator[dict[str, Any]]:
    """Yield the evaluation loss after each epoch. A training cut short evaluates at its last step."""
    metrics = trace.row.record.metrics
    if not metrics.steps_per_epoch:
        return
    for epoch, loss in enumerate(metrics.eval_losses, start=1):
        step = epoch * metrics.steps_per_epoch
        yield {"run": trace.name, "step": min(step, metrics.total_steps or step), "loss": loss, "kind": EVALUATION}


def compare_losses(traces: Sequence[RunTrace]) -> Iterator[str]:
    """Report which runs trained the same model: at each logged step their losses agree."""
    trainings: dict[str, list[RunTrace]] = {}
    for each in traces:
        trainings.setdefault(_training_key(each), []).append(each)
    several_tasks = len({task_name(each.row.settings) for each in traces}) > 1
    for alike in trainings.values():
        if len(alike) > 1:
            yield _compare(alike, task_name(alike[0].row.settings) if several_tasks else "")


def _training_key(trace: RunTrace) -> str:
    """Return a key that is equal for runs whose losses should agree."""
    settings = {
        name: value for name, value in trace.row.settings.items()
        if name not in NOT_THE_MODEL and not is_strategy_option(name)
        and not is_environment_setting(name)
    }  # fmt: skip
    return json.dumps([settings, global_batch(trace.row.settings)], sort_keys=True, default=str)


def _compare(traces: Sequence[RunTrace], task: str) -> str:
    """Describe the largest difference of any two runs at a step that both logged."""
    differences = ((*_largest_difference(one, other), one, other) for one, other in combinations(traces, 2))
    largest, step, one, other = max(differences, key=lambda each: each[0])
    batch = global_batch(traces[0].row.settings)
    details = ", ".join(filter(None, [task, f"global batch {batch}" if batch else ""]))
    runs = f"{len(traces)} runs" + (f" ({details})" if details else "")
    if largest > SAME_LOSS[traces[0].row.settings["precision"]]:
        pair = f"{one.name} and {other.name}"
        return f"Different losses: {runs} differ by up to {100 * largest:.2g}%, at step {step} of {pair}."
    gap = f"agree within {100 * largest:.2g}%" if largest else "are equal"
    return f"Same training: losses of {runs} {gap} at every logged step."


def _largest_difference(one: RunTrace, other: RunTrace) -> tuple[float, int]:
    """Return the largest relative difference of two runs' losses and its step; 0 and 0 without common steps."""
    ours, theirs = _losses(one), _losses(other)
    gaps = [
        (abs(ours[step] - theirs[step]) / max(abs(ours[step]), abs(theirs[step]), 1e-12), step)
        for step in ours.keys() & theirs.keys()
    ]
    return max(gaps, key=lambda gap: gap[0], default=(0.0, 0))

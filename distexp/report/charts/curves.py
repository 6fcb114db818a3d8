"""Losses over the steps, and how long the steps took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from distexp.report.charts.theme import colour, values
from distexp.report.traces import RunTrace


def losses(traces: Sequence[RunTrace]) -> alt.LayerChart | None:
    """Training losses as lines, evaluations as rings; None where no run got as far as a step."""
    lines = [
        {"run": each.name, "step": entry["step"], "loss": entry["loss"]}
        for each in traces for entry in each.steps if entry.get("loss") is not None
    ]  # fmt: skip
    if not lines:
        return None
    picked = alt.selection_point(fields=["run"], bind="legend")
    x = alt.X("step:Q", title="step", axis=alt.Axis(grid=False, tickMinStep=1))
    y = alt.Y("loss:Q", title="loss", scale=alt.Scale(zero=False))
    strength = alt.condition(picked, alt.value(0.95), alt.value(0.12))
    tooltip = ["run:N", "step:Q", alt.Tooltip("loss:Q", format=".4f")]
    # The later the finer, so that a curve shows under another one that follows it.
    drawn = [
        alt.Chart(values([row for row in lines if row["run"] == each.name]))
        .mark_line(strokeWidth=2 + 0.7 * (len(traces) - 1 - n))
        .encode(x=x, y=y, color=_by_run(traces), opacity=strength, tooltip=tooltip)
        for n, each in enumerate(traces) if any(entry.get("loss") is not None for entry in each.steps)
    ]  # fmt: skip
    evaluated = alt.Chart(values(_evaluations(traces))).mark_point(filled=False, size=70, strokeWidth=2).encode(
        x=x, y=y, color=_by_run(traces), opacity=strength, tooltip=tooltip
    )  # fmt: skip
    return alt.layer(*drawn, evaluated).add_params(picked).properties(height=320)


def step_times(traces: Sequence[RunTrace]) -> alt.LayerChart | None:
    """A tick a line of metrics.jsonl, the median and the 90th percentile of all measured steps over them."""
    ticks = [
        {"run": each.name, "ms": round(1000 * entry["step_time_s"], 3)}
        for each in traces for entry in _measured(each) if entry.get("step_time_s") is not None
    ]  # fmt: skip
    quantiles = [
        {"run": each.name, **{key: 1000 * value for key, value in measured.items()}}
        for each in traces if (measured := each.row.record.metrics.step_time_s)
    ]  # fmt: skip
    if not ticks and not quantiles:
        return None
    names = [each.name for each in traces]
    # A line a setting: a phone has no room for them side by side.
    axis = alt.Axis(labelExpr="split(datum.label, ', ')", labelLimit=190, ticks=False, domain=False, grid=False)
    lines = max(name.count(", ") + 1 for name in names)
    y = alt.Y("run:N", sort=names, title=None, axis=axis)
    scale = alt.Scale(zero=True)
    marks: list[Any] = [
        alt.Chart(values(ticks)).mark_tick(thickness=1.5, opacity=0.45, size=16).encode(
            x=alt.X("ms:Q", title="ms a step", scale=scale), y=y,
            color=_by_run(traces, legend=False), tooltip=["run:N", alt.Tooltip("ms:Q", format=",.2f")]),
    ]  # fmt: skip
    if quantiles:
        tooltip = [
            "run:N",
            *(alt.Tooltip(f"{key}:Q", title=f"{key} ms", format=",.2f") for key in ("p50", "p90", "max")),
        ]
        base = alt.Chart(values(quantiles)).encode(y=y, tooltip=tooltip)
        marks += [
            base.mark_rule(strokeWidth=2, color=colour("ink")).encode(x=alt.X("p50:Q"), x2="p90:Q"),
            base.mark_point(filled=True, size=70, color=colour("ink"), opacity=1).encode(x="p50:Q"),
            base.mark_point(shape="stroke", angle=90, size=160, strokeWidth=2, color=colour("ink"), opacity=1)
            .encode(x="p90:Q"),
        ]  # fmt: skip
    return alt.layer(*marks).properties(height=max(34, 14 * lines + 10) * len(names))


def _by_run(traces: Sequence[RunTrace], *, legend: bool = True) -> alt.Color:
    domain = [each.name for each in traces]
    return alt.Color("run:N", scale=alt.Scale(domain=domain),
                     legend=alt.Legend(title=None, columns=1) if legend and len(domain) > 1 else None)  # fmt: skip


def _evaluations(traces: Sequence[RunTrace]) -> list[dict[str, Any]]:
    """The loss after each epoch; a training cut short evaluates at its last step."""
    found = []
    for each in traces:
        metrics = each.row.record.metrics
        for epoch, loss in enumerate(metrics.eval_losses, start=1):
            if metrics.steps_per_epoch:
                last = metrics.total_steps or epoch * metrics.steps_per_epoch
                found.append({"run": each.name, "step": min(epoch * metrics.steps_per_epoch, last), "loss": loss})
    return found


def _measured(traced: RunTrace) -> list[dict[str, Any]]:
    """The lines after the warm-up, and before what was profiled."""
    warm = traced.row.settings.get("measure_after_step") or 0
    profiled = (traced.row.record.metrics.communication or {}).get("first_step") or math.inf
    return [entry for entry in traced.steps if warm < entry["step"] < profiled] or list(traced.steps)

"""Times of the training steps: median, 90th percentile, and each logged mean."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt

from distexp.report.data.overview import Overview
from distexp.report.figures.base import Figure, Panel, describe_selection
from distexp.report.figures.theme import color, inline_data
from distexp.report.traces import RunTrace
from distexp.runs.listing import join_first

Rows = list[dict[str, Any]]


def build_step_times(overview: Overview, traces: Sequence[RunTrace]) -> Figure | None:
    """Build the figure; None if no step time was measured."""
    ticks = [
        {"run": trace.name, "ms": round(1000 * entry["step_time_s"], 3)}
        for trace in traces for entry in _measured(trace) if entry.get("step_time_s") is not None
    ]  # fmt: skip
    quantiles = [
        {"run": trace.name, **{key: 1000 * value for key, value in times.items()}}
        for trace in traces if (times := trace.row.record.metrics.step_time_s)
    ]  # fmt: skip
    if not ticks and not quantiles:
        return None
    caption = f"{_describe_marks(traces)} {describe_selection(overview, traces)}".strip()
    panels = (Panel("", _draw(traces, ticks, quantiles)),)
    return Figure("step_times", "Step times", panels, caption, tuple(_data_wait(traces)))


def _describe_marks(traces: Sequence[RunTrace]) -> str:
    counts = sorted({trace.row.settings.get("log_every") or 1 for trace in traces})
    thin = "one step" if counts == [1] else f"mean of {join_first(map(str, counts))} steps (train.log_every)"
    return f"Dot: median. Bar: up to the 90th percentile. Each thin line: {thin}. The first steps are left out."


def _measured(trace: RunTrace) -> list[dict[str, Any]]:
    """Return the lines whose steps all count for the speed; every line of a run whose speed was not measured."""
    metrics, settings = trace.row.record.metrics, trace.row.settings
    if metrics.step_time_s is None:
        return list(trace.steps)
    warmup, stride = settings.get("measure_after_step") or 0, settings.get("log_every") or 1
    unmeasured = (metrics.communication or {}).get("first_step") or math.inf  # the warm-up of the profiler
    return [
        entry for entry in trace.steps
        if warmup <= (entry["step"] - 1) // stride * stride and entry["step"] < unmeasured
    ]  # fmt: skip


def _draw(traces: Sequence[RunTrace], ticks: Rows, quantiles: Rows) -> alt.LayerChart:
    names = [trace.name for trace in traces]
    # One line per setting: a phone has no room for them in one line.
    labels = alt.Axis(labelExpr="split(datum.label, ', ')", labelLimit=190, ticks=False, domain=False, grid=False)
    lines = max(name.count(", ") + 1 for name in names)
    y = alt.Y("run:N", sort=names, title=None, axis=labels)
    x = alt.X("ms:Q", title="step time (ms)", scale=alt.Scale(zero=True), axis=alt.Axis(tickCount=6))
    thin = alt.Chart(inline_data(ticks)).mark_tick(thickness=1.5, opacity=0.45, size=16).encode(
        x=x, y=y, color=alt.Color("run:N", scale=alt.Scale(domain=names), legend=None),
        tooltip=["run:N", alt.Tooltip("ms:Q", format=",.2f")],
    )  # fmt: skip
    marks = [thin, *(_quantile_marks(quantiles, y) if quantiles else ())]
    return alt.layer(*marks).properties(height=max(34, 14 * lines + 10) * len(names))


def _quantile_marks(quantiles: Rows, y: alt.Y) -> list[alt.Chart]:
    tooltip = ["run:N", *(alt.Tooltip(f"{key}:Q", title=f"{key} ms", format=",.2f") for key in ("p50", "p90", "max"))]
    base = alt.Chart(inline_data(quantiles)).encode(y=y, tooltip=tooltip)
    ink = {"color": color("ink"), "opacity": 1}
    return [
        base.mark_rule(strokeWidth=2, color=color("ink")).encode(x=alt.X("p50:Q"), x2="p90:Q"),
        base.mark_point(filled=True, size=70, **ink).encode(x="p50:Q"),
        base.mark_point(shape="stroke", angle=90, size=160, strokeWidth=2, **ink).encode(x="p90:Q"),
    ]


def _data_wait(traces: Sequence[RunTrace]) -> Iterator[str]:
    """Name the run that waited longest for data, relative to its runtime."""
    waits = []
    for trace in traces:
        metrics = trace.row.record.metrics
        if metrics.data_wait_s is not None and metrics.train_runtime:
            waits.append((metrics.data_wait_s / metrics.train_runtime, trace))
    if waits:
        share, slowest = max(waits, key=lambda pair: pair[0])
        yield f"Longest wait for data: {share:.1%} of the runtime, run {slowest.row.label}."

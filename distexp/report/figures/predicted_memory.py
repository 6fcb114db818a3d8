"""Predicted memory through one training step: a panel per run, with its parts stacked, and the table of errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import altair as alt

from distexp.report.data.overview import Overview
from distexp.report.data.peak_parts import TITLES
from distexp.report.data.predictions import build_predictions_table
from distexp.report.figures.base import Figure, LegendEntry, Panel, describe_selection
from distexp.report.figures.peak_parts import COLORS
from distexp.report.figures.theme import color, inline_data
from distexp.report.traces import RunTrace
from distexp.runs.prediction import PHASE, Curve

HEIGHT = 190  # pixels
CAPTION = "One worker, from the start to the end of a step. Dashed lines: a new phase. Height: memory of each part."


def build_predicted_memory(overview: Overview, traces: Sequence[RunTrace]) -> Figure | None:
    """Build the figure; None if no run was predicted."""
    table = build_predictions_table(overview)
    if table is None:
        return None
    drawn = [trace for trace in traces if trace.predicted]
    parts = list(dict.fromkeys(part for trace in drawn for part in _parts(trace.predicted)))
    panels = tuple(Panel(trace.name, _draw(trace.predicted, parts)) for trace in drawn)
    caption = f"{CAPTION} {describe_selection(overview, drawn)}".strip() if drawn else ""
    legend = tuple(LegendEntry(_title(part), _shade(part), "bar") for part in parts)
    return Figure(
        "predicted_memory", "Predicted memory through a training step", panels, caption, tables=(table,), legend=legend
    )


def _shade(part: str) -> str:
    """Return the color of a part, as in the figure of the peak."""
    return COLORS.get(TITLES.get(f"{part}_mib", ""), "muted")


def _parts(curve: Curve) -> list[str]:
    """Return the parts that are not always 0."""
    return [name for name, values in curve.items() if name != PHASE and any(values)]


def _title(part: str) -> str:
    return part.replace("_", " ")


def _draw(curve: Curve, parts: Sequence[str]) -> alt.LayerChart:
    last = max(1, len(curve[PHASE]) - 1)
    rows: list[dict[str, Any]] = [
        {"position": round(100 * n / last, 2), "phase": phase, "part": _title(part), "order": order,
         "mib": curve[part][n]}
        for n, phase in enumerate(curve[PHASE]) for order, part in enumerate(parts) if part in curve
    ]  # fmt: skip
    scale = alt.Scale(domain=list(map(_title, parts)), range=[color(_shade(part)) for part in parts])
    x = alt.X("position:Q", title="part of the step (%)", scale=alt.Scale(domain=[0, 100]), axis=alt.Axis(grid=False))
    areas = alt.Chart(inline_data(rows)).mark_area(opacity=0.85).encode(
        x=x, y=alt.Y("mib:Q", title="MiB", stack="zero", axis=alt.Axis(tickCount=5)), order="order:Q",
        color=alt.Color("part:N", scale=scale, legend=alt.Legend(title=None, direction="horizontal", columns=4)),
        tooltip=["phase:N", "part:N", alt.Tooltip("mib:Q", title="MiB", format=",.0f")],
    )  # fmt: skip
    lines = alt.Chart(inline_data(list(_changes(curve, last)))).mark_rule(strokeDash=[4, 3], color=color("muted"))
    return alt.layer(areas, lines.encode(x=x, tooltip=["phase:N"])).properties(height=HEIGHT)


def _changes(curve: Curve, last: int) -> Iterator[dict[str, Any]]:
    """Yield the positions at which a phase starts."""
    for number, (before, after) in enumerate(pairwise(curve[PHASE]), start=1):
        if before != after:
            yield {"position": round(100 * number / last, 2), "phase": after}

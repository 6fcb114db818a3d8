"""Memory of one worker by part: a stacked bar per training, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from distexp.report.data.memory_parts import build_parts_table, measured_groups
from distexp.report.data.metric_readers import PARTS
from distexp.report.data.overview import Overview
from distexp.report.data.settings import run_label
from distexp.report.figures.bar_labels import FEW_BARS, bar_height, label_axis
from distexp.report.figures.base import Figure, LegendEntry, Panel
from distexp.report.figures.theme import color, inline_data
from distexp.report.traces import RunTrace

MAX_BARS = 24
BAR_HEIGHT = 26  # pixels
COLORS = {title: f"c{n}" for n, title in enumerate(PARTS.values(), start=1)}
"""Colors of the parts by title."""


def build_memory_parts(overview: Overview, traces: Sequence[RunTrace]) -> Figure | None:
    """Build the figure; None if no run measured its parts."""
    table = build_parts_table(overview)
    if table is None:
        return None
    panels = (Panel("", _draw(overview)),)
    caption = "One worker, without Python and libraries."
    legend = tuple(LegendEntry(title, shade, "bar") for title, shade in COLORS.items())
    return Figure("memory_parts", "Memory by part", panels, caption, tables=(table,), legend=legend)


def _draw(overview: Overview) -> alt.LayerChart:
    groups = measured_groups(overview)[:MAX_BARS]
    labels = [overview.describe(group) if len(groups) <= FEW_BARS else run_label(group.label) for group in groups]
    rows: list[dict[str, Any]] = [
        {"run": label, "part": title, "order": order, "mib": round(value.mean, 6),
         "settings": overview.format_settings(group)}
        for label, group in zip(labels, groups, strict=True)
        for order, (name, title) in enumerate(PARTS.items()) if (value := group.metric(name))
    ]  # fmt: skip
    scale = alt.Scale(domain=list(COLORS), range=list(map(color, COLORS.values())))
    legend = alt.Legend(title=None, direction="horizontal", columns=4)
    names = list(dict.fromkeys(row["run"] for row in rows))
    bars = alt.Chart(inline_data(rows)).mark_bar().encode(
        x=alt.X("mib:Q", title="MiB", stack="zero", axis=alt.Axis(tickCount=6)),
        y=alt.Y("run:N", sort=names, title=None, axis=label_axis(names)),
        color=alt.Color("part:N", scale=scale, legend=legend), order="order:Q",
        tooltip=["run:N", "settings:N", "part:N", alt.Tooltip("mib:Q", title="MiB", format=",.3f")],
    )  # fmt: skip
    return alt.layer(bars).properties(height=bar_height(names, BAR_HEIGHT) * len(names))

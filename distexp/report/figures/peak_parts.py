"""GPU memory at the peak of a step by part: a measured bar per training, and the predicted one below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt

from distexp.report.data.overview import Overview
from distexp.report.data.peak_parts import TITLES, GroupPeaks, Peak, build_peaks_table, measured_peaks
from distexp.report.data.settings import run_label
from distexp.report.figures.bar_labels import FEW_BARS, bar_height, label_axis
from distexp.report.figures.base import Figure, LegendEntry, Panel
from distexp.report.figures.theme import MAX_COLORS, color, inline_data
from distexp.report.traces import RunTrace

MAX_BARS = 16  # each with a predicted one
BAR_HEIGHT = 24  # pixels
PREDICTED_OPACITY = 0.55
COLORS = {title: f"c{n}" if n <= MAX_COLORS else "muted" for n, title in enumerate(TITLES.values(), start=1)}
COLORS |= {TITLES["other_mib"]: "phase-setup", TITLES["reserve_mib"]: "line", TITLES["context_mib"]: "muted"}


def build_peak_parts(overview: Overview, traces: Sequence[RunTrace]) -> Figure | None:
    """Build the figure; None if the memory of no step was recorded."""
    found = measured_peaks(overview)
    if not found:
        return None
    shown = found[:MAX_BARS]
    titles = [
        title for name, title in TITLES.items() if any(peak.parts.get(name) for run in shown for peak in run.peaks)
    ]
    return Figure(
        "peak_parts", "GPU memory by part at the peak", (Panel("", _draw(overview, shown, titles)),),
        " ".join(_describe(found)), tables=(build_peaks_table(overview, found),),
        legend=tuple(LegendEntry(title, COLORS[title], "bar") for title in titles),
    )  # fmt: skip


def _describe(found: Sequence[GroupPeaks]) -> Iterator[str]:
    yield "One worker, at the peak of a step."
    if any(len(run.peaks) > 1 for run in found):
        yield "Pale: predicted by distexp plan before the run."
    if len(found) > MAX_BARS:
        yield f"Drawn: {MAX_BARS} of {len(found)}."


def _draw(overview: Overview, shown: Sequence[GroupPeaks], titles: Sequence[str]) -> alt.LayerChart:
    few = sum(len(run.peaks) for run in shown) <= FEW_BARS
    labels = [overview.describe(run.group, run.row.label) if few else run_label(run.row.label) for run in shown]
    rows = [
        row for run, label in zip(shown, labels, strict=True) for peak in run.peaks
        for row in _rows(overview, run, peak, label)
    ]  # fmt: skip
    bars = list(dict.fromkeys(row["bar"] for row in rows))
    scale = alt.Scale(domain=list(titles), range=[color(COLORS[title]) for title in titles])
    axis = label_axis(labels, "split(datum.label, '|')[1]")
    parts = alt.Chart(inline_data(rows)).mark_bar().encode(
        x=alt.X("mib:Q", title="MiB", stack="zero", axis=alt.Axis(tickCount=6)),
        y=alt.Y("bar:N", sort=bars, title=None, axis=axis, scale=alt.Scale(paddingInner=0.15)),
        color=alt.Color("part:N", scale=scale, legend=alt.Legend(title=None, direction="horizontal", columns=4)),
        opacity=alt.condition("datum.kind === 'predicted'", alt.value(PREDICTED_OPACITY), alt.value(1)),
        order="order:Q",
        tooltip=["run:N", "settings:N", "kind:N", "phase:N", "part:N",
                 alt.Tooltip("mib:Q", title="MiB", format=",.0f")],
    )  # fmt: skip
    return alt.layer(parts).properties(height=bar_height(labels, BAR_HEIGHT) * len(bars))


def _rows(overview: Overview, peaks: GroupPeaks, peak: Peak, label: str) -> Iterator[dict[str, Any]]:
    for order, (name, title) in enumerate(TITLES.items()):
        if name in peak.parts:
            yield {
                "bar": f"{label} {peak.kind}|{label if peak.kind == 'measured' else 'predicted'}",
                "run": peaks.row.label, "settings": overview.format_settings(peaks.group), "kind": peak.kind,
                "phase": peak.phase or "-", "part": title, "order": order, "mib": round(peak.parts[name], 1),
            }  # fmt: skip

"""Where the step goes: a stacked bar for each profiled run, or for each rank of the only one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from distexp.report.data.overview import Overview
from distexp.report.data.settings import run_label
from distexp.report.data.step_parts import (
    STEP_PARTS,
    ProfiledRun,
    RankStep,
    bar_unit,
    build_step_table,
    profiled_runs,
)
from distexp.report.figures.bar_labels import FEW_BARS, bar_height, label_axis
from distexp.report.figures.base import Figure, LegendEntry, Panel
from distexp.report.figures.theme import color, inline_data
from distexp.report.traces import RunTrace

MAX_BARS = 24
MAX_SENTENCES = 8
ROOM = 1.2  # of the axis, relative to the longest bar: for its label


@dataclass(frozen=True)
class Bar:
    """A bar with its label: the step of a rank."""

    label: str
    run: ProfiledRun
    step: RankStep


def build_step_breakdown(overview: Overview, traces: Sequence[RunTrace]) -> Figure | None:
    """Build the figure; None if no run was profiled."""
    runs = profiled_runs(overview)
    if not runs:
        return None
    bars = _name_bars(overview, runs)
    return Figure(
        "step_breakdown", "Where the step goes", (Panel("", _draw(overview, runs, bars[:MAX_BARS])),),
        " ".join(_describe(runs, len(bars))), tuple(_explain(overview, runs)), (build_step_table(overview, runs),),
        tuple(LegendEntry(title, shade, "bar") for title, shade in _colors(bars).items()),
    )  # fmt: skip


def _describe(runs: Sequence[ProfiledRun], count: int) -> Iterator[str]:
    if len(runs) == 1:
        yield "A bar is the median profiled step of a rank."
    else:
        yield "A bar is the median profiled step of a run's slowest rank."
    unit = bar_unit(runs)
    if unit.per_sample:
        yield "Times are per sample, because the global batch sizes differ."
    yield "The parts add up to the step. Communication that runs behind computation is not drawn."
    if any(run.is_scaled for run in runs):
        yield "On a CPU a bar has the length of the median of the other steps."
        yield "Its percentages are those of the profiled step."
    if different := [run for run in runs if run.differs]:
        bars = f"Some profiled steps ({len(different)} of {len(runs)} runs)"
        yield f"{bars} are shorter or longer than the median of the other steps by more than 5%."
        if unit.of_median:
            yield "So each bar has the length of that median. Its percentages are those of the profiled step."
        else:
            yield "Compare the shares of the bars, not their times."
    if count > MAX_BARS:
        yield f"Drawn: {MAX_BARS} of {count}."


def _explain(overview: Overview, runs: Sequence[ProfiledRun]) -> Iterator[str]:
    """Yield the bottleneck of each run, and the overrides that may reduce it."""
    explained = [run for run in runs if run.sentence]
    for run in explained[:MAX_SENTENCES]:
        yield f"R{overview.describe(run.group)[1:]}: {run.sentence}"
    if len(explained) > MAX_SENTENCES:
        yield f"{len(explained) - MAX_SENTENCES} more are in the records (metrics.explanation)."


def _name_bars(overview: Overview, runs: Sequence[ProfiledRun]) -> list[Bar]:
    """Return the bars: the ranks of the only run, or a run each."""
    if len(runs) == 1:
        return [Bar(f"rank {step.rank}", runs[0], step) for step in runs[0].ranks]
    if len(runs) > FEW_BARS:
        return [Bar(run_label(run.row.label), run, run.slowest) for run in runs]
    return [Bar(overview.describe(run.group, run.row.label), run, run.slowest) for run in runs]


def _draw(overview: Overview, runs: Sequence[ProfiledRun], bars: Sequence[Bar]) -> alt.LayerChart:
    unit = bar_unit(runs)
    names = [bar.label for bar in bars]
    lengths = [unit.convert(bar.run, bar.step.step_ms) for bar in bars]
    y = alt.Y("bar:N", sort=names, title=None, axis=label_axis(names), scale=alt.Scale(paddingInner=0.25))
    x = alt.X("ms:Q", title=unit.title, stack="zero", axis=alt.Axis(tickCount=6),
              scale=alt.Scale(domain=[0, ROOM * max(lengths)], nice=False))  # fmt: skip
    parts = alt.Chart(inline_data(list(_parts(overview, runs, bars)))).mark_bar().encode(
        x=x, y=y, color=_part_color(bars), order="order:Q",
        tooltip=["run:N", "rank:Q", "settings:N", "part:N",
                 alt.Tooltip("ms:Q", title=unit.title, format=",.3~f"),
                 alt.Tooltip("share:Q", title="of the step", format=".1%")],
    )  # fmt: skip
    totals = [
        {"bar": name, "ms": length, "text": f"{length:,.3g}"} for name, length in zip(names, lengths, strict=True)
    ]
    labels = alt.Chart(inline_data(totals)).mark_text(align="left", dx=5).encode(x="ms:Q", y=y, text="text:N")
    return alt.layer(parts, labels).properties(height=bar_height(names, 30) * len(bars))


def _colors(bars: Sequence[Bar]) -> dict[str, str]:
    """Return the color of each part that any bar has, by its title."""
    return {
        title: f"c{n}" for n, (name, title) in enumerate(STEP_PARTS.items(), start=1)
        if any(bar.step.parts.get(name) for bar in bars)
    }  # fmt: skip


def _part_color(bars: Sequence[Bar]) -> alt.Color:
    colors = _colors(bars)
    scale = alt.Scale(domain=list(colors), range=list(map(color, colors.values())))
    return alt.Color("part:N", scale=scale, legend=alt.Legend(title=None, direction="horizontal", columns=4))


def _parts(overview: Overview, runs: Sequence[ProfiledRun], bars: Sequence[Bar]) -> Iterator[dict[str, Any]]:
    unit = bar_unit(runs)
    for bar in bars:
        for order, (part, milliseconds) in enumerate(bar.step.parts.items()):
            yield {
                "bar": bar.label, "run": bar.run.row.label, "rank": bar.step.rank,
                "settings": overview.format_settings(bar.run.group), "part": STEP_PARTS[part], "order": order,
                "ms": float(f"{unit.convert(bar.run, milliseconds):.5g}"),
                "share": round(milliseconds / bar.step.step_ms, 4),
            }  # fmt: skip

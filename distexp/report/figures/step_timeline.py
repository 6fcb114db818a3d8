"""Timeline of one step: the lanes of a few ranks, one panel per profiled run, with links to the full traces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import altair as alt

from distexp.report.data.overview import Overview
from distexp.report.data.step_lanes import RankLanes
from distexp.report.data.step_parts import read_ranks
from distexp.report.figures.base import Figure, LegendEntry, Panel
from distexp.report.figures.theme import color, inline_table
from distexp.report.traces import RunTrace
from distexp.runs.step_parts import PARTS

MAX_RANKS = 8  # of all panels together: each has up to 1,200 marks
LANE_HEIGHT = 20  # pixels
KNOWN = {
    PARTS["matmul"]: "c1", PARTS["other_kernels"]: "c2", PARTS["optimizer"]: "c7", PARTS["waiting"]: "c4",
    PARTS["data_wait"]: "c6",
    "forward": "phase-setup", "backward": "phase-save",
}  # fmt: skip
"""Colors of labels. Those of parts are as in the figure of where the step goes."""
OTHERS = ("c3", "c5", "c8", "phase-search", "phase-warmup", "phase-eval")
"""Colors of all other labels, such as the collectives."""
ZOOM = "wheel![event.ctrlKey]"
"""Zoom with Ctrl only: without it the wheel scrolls the page."""


def build_step_timeline(overview: Overview, traces: Sequence[RunTrace]) -> Figure | None:
    """Build the figure; None if no run has the lanes of a step."""
    drawn = [trace for trace in traces if trace.lanes]
    if not drawn:
        return None
    chosen = [(trace, choose_ranks(trace, max(1, MAX_RANKS // len(drawn)))) for trace in drawn]
    colors = assign_colors(rank for _, ranks in chosen for rank in ranks)
    panels = tuple(
        Panel(trace.name, _draw(ranks, colors, f"zoom_{n}"), trace.profiles) for n, (trace, ranks) in enumerate(chosen)
    )
    legend = tuple(LegendEntry(label, shade, "bar") for label, shade in colors.items())
    return Figure(
        "step_timeline", "Timeline of one step", panels, " ".join(_describe(chosen)), legend=legend, is_wide=True
    )


def choose_ranks(trace: RunTrace, limit: int) -> list[RankLanes]:
    """Return the ranks to draw: all, or the slowest and the fastest one without waiting, then the first ones."""
    if len(trace.lanes) <= limit:
        return list(trace.lanes)
    own = {times.rank: times.own_ms for times in read_ranks(trace.row)}
    by_time = sorted(trace.lanes, key=lambda lane: own.get(lane.rank, 0.0), reverse=True)
    first = [by_time[0].rank, by_time[-1].rank] if own else []
    order = dict.fromkeys([*first, *(lane.rank for lane in trace.lanes)])
    kept = set(list(order)[:limit])
    return [lane for lane in trace.lanes if lane.rank in kept]


def assign_colors(ranks: Iterator[RankLanes]) -> dict[str, str]:
    """Return the color of each label: the known ones in their order, then the collectives and others."""
    labels = {span.label for rank in ranks for spans in rank.lanes.values() for span in spans}
    others = {label: OTHERS[n % len(OTHERS)] for n, label in enumerate(sorted(labels - set(KNOWN)))}
    return {label: shade for label, shade in KNOWN.items() if label in labels} | others


def _describe(chosen: Sequence[tuple[RunTrace, Sequence[RankLanes]]]) -> Iterator[str]:
    yield "The median profiled step of each rank, from its start. Ctrl and the wheel zoom, a drag moves, a double"
    yield "click resets. This step includes the overhead of the profiler."
    if any(len(ranks) < len(trace.lanes) for trace, ranks in chosen):
        yield "Not all ranks are drawn, but the slowest one of each run is."


def _draw(ranks: Sequence[RankLanes], colors: dict[str, str], zoom_name: str) -> alt.LayerChart:
    lanes = {f"rank {rank.rank} {title}": spans for rank in ranks for title, spans in rank.lanes.items()}
    rows = (
        (lane, round(span.begin_ms, 3), round(span.end_ms, 3), span.label) for lane, spans in lanes.items()
        for span in spans
    )  # fmt: skip
    names = list(_with_gaps(ranks))
    end = max(rank.step_ms for rank in ranks)
    zoom = alt.selection_interval(name=zoom_name, bind="scales", encodings=["x"], zoom=ZOOM)
    data = inline_table(("lane", "begin", "end", "label"), rows)
    x = alt.X("begin:Q", title="time in the step (ms)", scale=alt.Scale(domain=[0, end], nice=False),
              axis=alt.Axis(tickCount=8))  # fmt: skip
    y = alt.Y("lane:N", sort=names, title=None, axis=alt.Axis(ticks=False, domain=False, grid=False),
              scale=alt.Scale(domain=names, paddingInner=0.2))  # fmt: skip
    spans = alt.Chart(data).transform_calculate(ms="datum.end - datum.begin").mark_bar(clip=True).encode(
        x=x, x2="end:Q", y=y, color=_label_color(colors),
        tooltip=["lane:N", "label:N", alt.Tooltip("begin:Q", title="start (ms)", format=",.3f"),
                 alt.Tooltip("ms:Q", title="duration (ms)", format=",.3f")],
    ).add_params(zoom)  # fmt: skip
    return alt.layer(spans).properties(height=LANE_HEIGHT * len(names))


def _label_color(colors: dict[str, str]) -> alt.Color:
    scale = alt.Scale(domain=list(colors), range=list(map(color, colors.values())))
    return alt.Color("label:N", scale=scale, legend=alt.Legend(title=None, direction="horizontal", columns=4))


def _with_gaps(ranks: Sequence[RankLanes]) -> Iterator[str]:
    """Yield the names of the lanes, and an empty lane between two ranks."""
    for n, rank in enumerate(ranks):
        if n:
            yield " " * n  # names of a scale are unique
        yield from (f"rank {rank.rank} {title}" for title in rank.lanes)

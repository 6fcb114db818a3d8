"""GPU and CPU memory over time: one panel per run, one line per node, the phases as shaded areas."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from distexp.report.data.overview import Overview
from distexp.report.figures.base import Figure, LegendEntry, Panel, describe_selection
from distexp.report.figures.theme import MAX_COLORS, PHASES, color, inline_data
from distexp.report.traces import RunTrace
from distexp.runs.device_entries import UNCOUNTED_CPU_PHASES
from distexp.runs.memory_trace import CPU

UNEVEN = 1.1  # ratio of two nodes' peaks
SEARCH, PROFILE = "search", "profile"
DEVICES = {"gpu": "GPU", "cpu": "CPU"}
LINES = {"gpu": "the fullest GPU of a node", "cpu": "the processes of the run on a node"}


def build_gpu_memory(overview: Overview, traces: Sequence[RunTrace]) -> Figure | None:
    """Build the figure of GPU memory; None if it was not sampled."""
    return _build(overview, traces, "gpu")


def build_cpu_memory(overview: Overview, traces: Sequence[RunTrace]) -> Figure | None:
    """Build the figure of CPU memory; None if it was not sampled."""
    return _build(overview, traces, "cpu")


def _build(overview: Overview, traces: Sequence[RunTrace], kind: str) -> Figure | None:
    sampled = [trace for trace in traces if trace.curves(kind)]
    if not sampled:
        return None
    nodes = sorted({curve.node for trace in sampled for curve in trace.curves(kind)})
    phases = [
        phase for phase in PHASES if any(phase == interval.phase for trace in sampled for interval in trace.phases)
    ]
    highest = max(mib for trace in sampled for curve in trace.curves(kind) for _, mib in curve.points)
    panels = tuple(Panel(_title(trace), _draw(trace, kind, highest, nodes, phases)) for trace in sampled)
    shades = " Shades: phases of the run. White: its processes start or end." if phases else ""
    caption = f"Line: {LINES[kind]}.{shades} {describe_selection(overview, traces)}".strip()
    sentences = (*_highest_peak(sampled, kind), *_uneven_nodes(sampled, kind))
    title = f"{DEVICES[kind]} memory over time"
    return Figure(f"{kind}_memory", title, panels, caption, sentences, legend=_legend(nodes, phases))


def _legend(nodes: Sequence[int], phases: Sequence[str]) -> tuple[LegendEntry, ...]:
    lines = [LegendEntry(f"node {node}", f"c{n % MAX_COLORS + 1}", "line") for n, node in enumerate(nodes)]
    areas = [LegendEntry(phase, f"phase-{phase}", "area") for phase in phases]
    return (*(lines if len(lines) > 1 else ()), *areas)


def _title(trace: RunTrace) -> str:
    return trace.name if trace.row.completed else f"{trace.name}: {trace.row.record.status}"


def _draw(trace: RunTrace, kind: str, highest: float, nodes: Sequence[int], phases: Sequence[str]) -> alt.LayerChart:
    """Draw the memory of a run. The memory axis is the same for all runs."""
    rows: list[dict[str, Any]] = [
        {"node": f"node {curve.node}", "seconds": second, "mib": mib}
        for curve in trace.curves(kind) for second, mib in curve.points
    ]  # fmt: skip
    end = max(row["seconds"] for row in rows)
    x = alt.X("seconds:Q", title="time (s)", scale=alt.Scale(domain=[0, end], nice=False),
              axis=alt.Axis(grid=False, tickCount=8))  # fmt: skip
    y = alt.Y("mib:Q", title="MiB", scale=alt.Scale(domain=[0, highest * 1.05], nice=False),
              axis=alt.Axis(tickCount=4))  # fmt: skip
    domain = [f"node {node}" for node in nodes]
    legend = alt.Legend(title=None, direction="horizontal", symbolType="stroke") if len(nodes) > 1 else None
    tooltip = ["node:N", alt.Tooltip("seconds:Q", format=".1f"), alt.Tooltip("mib:Q", title="MiB", format=",.0f")]
    line = alt.Chart(inline_data(rows)).mark_line(strokeWidth=1.8, clip=True)
    lines = line.encode(x=x, y=y, tooltip=tooltip,
                        color=alt.Color("node:N", scale=alt.Scale(domain=domain), legend=legend))  # fmt: skip
    shades = [_shades(trace, phases)] if phases else []  # Vega cannot draw an empty list of colors.
    return alt.layer(*shades, lines).properties(height=170)


def _shades(trace: RunTrace, phases: Sequence[str]) -> alt.Chart:
    rows = [
        {"phase": interval.phase, "begin": interval.begin_s, "end": interval.end_s}
        for interval in trace.phases
        if interval.phase in phases
    ]
    scale = alt.Scale(domain=list(phases), range=[color(f"phase-{phase}") for phase in phases])
    areas = alt.Chart(inline_data(rows)).mark_rect(opacity=0.17)
    return areas.encode(
        x=alt.X("begin:Q", title="time (s)"), x2="end:Q",
        fill=alt.Fill("phase:N", scale=scale, legend=alt.Legend(title=None, direction="horizontal")),
        tooltip=["phase:N", alt.Tooltip("begin:Q", format=".1f"), alt.Tooltip("end:Q", format=".1f")],
    )  # fmt: skip


@dataclass(frozen=True)
class _Peak:
    trace: RunTrace
    second: float
    mib: float

    @property
    def phase(self) -> str:
        """Return the phase of the run at this time; empty before the first one."""
        started = [interval.phase for interval in self.trace.phases if interval.begin_s <= self.second]
        return started[-1] if started else ""

    def counts(self, kind: str) -> bool:
        """Return whether the record counts this memory. On a GPU the memory of the profiler stays until the end."""
        if kind == CPU:
            return self.phase not in UNCOUNTED_CPU_PHASES
        profiles = (phase.begin_s for phase in self.trace.phases if phase.phase == PROFILE)
        return self.phase != SEARCH and self.second < min(profiles, default=math.inf)


def _highest_peak(traces: Sequence[RunTrace], kind: str) -> Iterator[str]:
    """Describe the highest peak of all runs: when and in which phase it was first reached."""
    peaks = (
        _Peak(trace, second, mib) for trace in traces for curve in trace.curves(kind) for second, mib in curve.points
    )
    counted = [peak for peak in peaks if peak.counts(kind)]
    if not counted:
        return
    highest = max(counted, key=lambda peak: (peak.mib, -peak.second))
    during = f" in phase {highest.phase}" if highest.phase else ""
    yield f"Highest peak: {highest.mib:,.0f} MiB{during}, {highest.trace.name}."
    left_out = {interval.phase for trace in traces for interval in trace.phases} & {SEARCH, PROFILE}
    if left_out:
        phases, are = ("phases", "are") if len(left_out) > 1 else ("phase", "is")
        yield f"As in the table, the {phases} {' and '.join(sorted(left_out))} {are} not counted."


def _uneven_nodes(traces: Sequence[RunTrace], kind: str) -> Iterator[str]:
    for trace in traces:
        counted = {
            curve.node: [mib for second, mib in curve.points if _Peak(trace, second, mib).counts(kind)]
            for curve in trace.curves(kind)
        }
        peaks = {node: max(values, default=0.0) for node, values in counted.items()}
        full, empty = max(peaks, key=peaks.__getitem__), min(peaks, key=peaks.__getitem__)
        if peaks[full] > UNEVEN * peaks[empty] > 0:
            values = f"{peaks[full]:,.0f} MiB on node {full}, {peaks[empty]:,.0f} MiB on node {empty}"
            yield f"The nodes of {trace.name} have different peaks: {values}."

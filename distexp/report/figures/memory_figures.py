"""Figures of memory: its parts, at the peak of a step, as predicted, and over time."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import altair as alt

from distexp.report.data.answer import differs, short_name
from distexp.report.data.forecasts import build_predictions_table
from distexp.report.data.memory_by_part import (
    TITLES,
    GroupPeaks,
    Peak,
    build_parts_table,
    build_peaks_table,
    measured_groups,
    measured_peaks,
)
from distexp.report.data.metrics import PARTS, PARTS_TOTAL
from distexp.report.data.overview import Overview
from distexp.report.data.rows import name_runs, run_label
from distexp.report.figures import base
from distexp.report.figures.labels import FEW_BARS, bar_height, label_axis
from distexp.report.traces import RunTrace
from distexp.runs.memory_trace import CPU, GPU
from distexp.runs.predictions import PHASE, Curve
from distexp.system.typed_values import TRIAL_PHASES, UNCOUNTED_CPU_PHASES, is_shared_gpu

MAX_BARS = 24
BAR_HEIGHT = 26  # pixels
COLORS = {title: f"c{n}" for n, title in enumerate(PARTS.values(), start=1)}  # colors of the parts by title
MAX_PEAK_BARS = 16  # each with a predicted one
PEAK_BAR_HEIGHT = 24  # pixels
PREDICTED_OPACITY = 0.55
PEAK_COLORS = {title: f"c{n}" if n <= base.MAX_COLORS else "muted" for n, title in enumerate(TITLES.values(), start=1)}
PEAK_COLORS |= {TITLES["other_mib"]: "phase-setup", TITLES["reserve_mib"]: "line", TITLES["context_mib"]: "muted"}
PREDICTED_HEIGHT = 190  # pixels
PREDICTED_CAPTION = (
    "One worker, from the start to the end of a step. Dashed lines: a new phase. Height: memory of each part."
)
UNEVEN = 1.1  # ratio of two nodes' peaks
PROFILE = "profile"
DEVICES = {"gpu": "GPU", "cpu": "CPU"}
MEMORY_LINES = {"gpu": "the fullest GPU of a node", "cpu": "the processes of the run on a node"}


def build_memory_parts(overview: Overview, traces: Sequence[RunTrace]) -> base.Figure | None:
    """Build the figure; None if no run measured its parts."""
    table = build_parts_table(overview)
    if table is None:
        return None
    legend = tuple(base.LegendEntry(title, shade, "bar") for title, shade in COLORS.items())
    return base.Figure(
        "memory_parts", "Memory by part", (base.Panel("", _draw_memory_parts(overview)),),
        "One worker, without Python and libraries.", tables=(table,), legend=legend,
        finding=_find_smallest(overview),
    )  # fmt: skip


def _find_smallest(overview: Overview) -> str:
    """Return how much less model memory one run holds than another one, or the largest part of the only run."""
    groups = measured_groups(overview)
    sizes = [(size.mean, group) for group in groups if (size := group.metric(PARTS_TOTAL))]
    if len(sizes) == 1:
        parts = {title: part.mean for name, title in PARTS.items() if (part := groups[0].metric(name))}
        title = max(parts, key=lambda title: parts[title])
        return f"{title[:1].upper()}{title[1:]} take {parts[title] / sum(parts.values()):.0%} of the model's memory"
    (least, small), (most, large) = (choose(sizes, key=lambda size: size[0]) for choose in (min, max))
    if len({group.task for group in groups}) > 1 or not differs(small, large, PARTS_TOTAL):
        return ""
    names = [short_name(overview, group).split(", ") for group in (small, large)]
    shared = [setting for setting in names[0] if setting in names[1]]
    one, other = (", ".join(setting for setting in name if setting not in shared) for name in names)
    if not (one and other):  # a setting that is off has no name
        one, other, shared = ", ".join(names[0]), ", ".join(names[1]), []
    both = f" ({', '.join(shared)})" if shared else ""
    return f"A worker of {one} holds {1 - least / most:.0%} less than one of {other}{both}"


def _draw_memory_parts(overview: Overview) -> alt.LayerChart:
    groups = measured_groups(overview)[:MAX_BARS]
    labels = [overview.describe(group) if len(groups) <= FEW_BARS else run_label(group.label) for group in groups]
    rows: list[dict[str, Any]] = [
        {"run": label, "part": title, "order": order, "mib": round(value.mean, 6),
         "settings": overview.format_settings(group)}
        for label, group in zip(labels, groups, strict=True)
        for order, (name, title) in enumerate(PARTS.items()) if (value := group.metric(name))
    ]  # fmt: skip
    names = list(dict.fromkeys(row["run"] for row in rows))
    bars = alt.Chart(base.inline_data(rows)).mark_bar().encode(
        x=alt.X("mib:Q", title="MiB", stack="zero", axis=alt.Axis(tickCount=6)),
        y=alt.Y("run:N", sort=names, title=None, axis=label_axis(names)),
        color=base.color_by("part:N", COLORS), order="order:Q",
        tooltip=["run:N", "settings:N", "part:N", alt.Tooltip("mib:Q", title="MiB", format=",.3f")],
    )  # fmt: skip
    return alt.layer(bars).properties(height=bar_height(names, BAR_HEIGHT) * len(names))


def build_peak_parts(overview: Overview, traces: Sequence[RunTrace]) -> base.Figure | None:
    """Build the figure; None if the memory of no step was recorded."""
    found = measured_peaks(overview)
    if not found:
        return None
    shown = found[:MAX_PEAK_BARS]
    titles = [
        title for name, title in TITLES.items() if any(peak.parts.get(name) for run in shown for peak in run.peaks)
    ]
    return base.Figure(
        "peak_parts", "GPU memory by part at the peak", (base.Panel("", _draw_peak_parts(overview, shown, titles)),),
        " ".join(_describe(found)), tables=(build_peaks_table(overview, found),),
        legend=tuple(base.LegendEntry(title, PEAK_COLORS[title], "bar") for title in titles),
        finding=_find_largest_part(found),
    )  # fmt: skip


def _find_largest_part(found: Sequence[GroupPeaks]) -> str:
    """Return the part that is the largest one at the peak of all runs; empty if they differ in it."""
    measured = [run.peaks[0].parts for run in found]
    largest = {max(parts, key=lambda name: parts[name]) for parts in measured if any(parts.values())}
    if len(largest) != 1:
        return ""
    name = largest.pop()
    shares = sorted({round(parts.get(name, 0.0) / sum(parts.values()), 2) for parts in measured if any(parts.values())})
    text = f"{shares[0]:.0%}" + (f" to {shares[-1]:.0%}" if len(shares) > 1 else "")
    return f"The largest part at the peak is {TITLES[name]}: {text}"


def _describe(found: Sequence[GroupPeaks]) -> Iterator[str]:
    yield "One worker, at the peak of a step."
    if any(len(run.peaks) > 1 for run in found):
        yield "Pale: predicted by distexp plan before the run."
    if len(found) > MAX_PEAK_BARS:
        yield f"Drawn: {MAX_PEAK_BARS} of {len(found)}."


def _draw_peak_parts(overview: Overview, shown: Sequence[GroupPeaks], titles: Sequence[str]) -> alt.LayerChart:
    few = sum(len(run.peaks) for run in shown) <= FEW_BARS
    labels = [overview.describe(run.group, run.row.label) if few else run_label(run.row.label) for run in shown]
    rows = [
        row for run, label in zip(shown, labels, strict=True) for peak in run.peaks
        for row in _rows(overview, run, peak, label)
    ]  # fmt: skip
    bars = list(dict.fromkeys(row["bar"] for row in rows))
    axis = label_axis(labels, "split(datum.label, '|')[1]")
    parts = alt.Chart(base.inline_data(rows)).mark_bar().encode(
        x=alt.X("mib:Q", title="MiB", stack="zero", axis=alt.Axis(tickCount=6)),
        y=alt.Y("bar:N", sort=bars, title=None, axis=axis, scale=alt.Scale(paddingInner=0.15)),
        color=base.color_by("part:N", {title: PEAK_COLORS[title] for title in titles}),
        opacity=alt.condition("datum.kind === 'predicted'", alt.value(PREDICTED_OPACITY), alt.value(1)),
        order="order:Q",
        tooltip=["run:N", "settings:N", "kind:N", "phase:N", "part:N",
                 alt.Tooltip("mib:Q", title="MiB", format=",.0f")],
    )  # fmt: skip
    return alt.layer(parts).properties(height=bar_height(labels, PEAK_BAR_HEIGHT) * len(bars))


def _rows(overview: Overview, peaks: GroupPeaks, peak: Peak, label: str) -> Iterator[dict[str, Any]]:
    for order, (name, title) in enumerate(TITLES.items()):
        if name in peak.parts:
            yield {
                "bar": f"{label} {peak.kind}|{label if peak.kind == 'measured' else 'predicted'}",
                "run": peaks.row.label, "settings": overview.format_settings(peaks.group), "kind": peak.kind,
                "phase": peak.phase or "-", "part": title, "order": order, "mib": round(peak.parts[name], 1),
            }  # fmt: skip


def build_predicted_memory(overview: Overview, traces: Sequence[RunTrace]) -> base.Figure | None:
    """Build the figure; None if no run was predicted."""
    table = build_predictions_table(overview)
    if table is None:
        return None
    drawn = [trace for trace in traces if trace.predicted]
    parts = [part for trace in drawn for part, mib in trace.predicted.items() if part != PHASE and any(mib)]
    colors = {part: PEAK_COLORS.get(TITLES.get(f"{part}_mib", ""), "muted") for part in parts}
    panels = tuple(base.Panel(trace.name, _draw_prediction(trace.predicted, colors)) for trace in drawn)
    caption = f"{PREDICTED_CAPTION} {base.describe_selection(overview, drawn)}".strip() if drawn else ""
    legend = tuple(base.LegendEntry(part.replace("_", " "), shade, "bar") for part, shade in colors.items())
    errors = [error.mean for group in overview.groups if (error := group.metric("prediction_error_pct"))]
    finding = f"The predicted peaks are within {max(map(abs, errors)):.1f}% of the measured ones" if errors else ""
    return base.Figure(
        "predicted_memory", "Predicted memory through a training step", panels, caption, tables=(table,),
        legend=legend, finding=finding,
    )  # fmt: skip


def _draw_prediction(curve: Curve, colors: Mapping[str, str]) -> alt.LayerChart:
    last = max(1, len(curve[PHASE]) - 1)
    rows: list[dict[str, Any]] = [
        {"position": round(100 * n / last, 2), "phase": phase, "part": part.replace("_", " "), "order": order,
         "mib": curve[part][n]}
        for n, phase in enumerate(curve[PHASE]) for order, part in enumerate(colors) if part in curve
    ]  # fmt: skip
    x = alt.X("position:Q", title="part of the step (%)", scale=alt.Scale(domain=[0, 100]), axis=alt.Axis(grid=False))
    areas = alt.Chart(base.inline_data(rows)).mark_area(opacity=0.85).encode(
        x=x, y=alt.Y("mib:Q", title="MiB", stack="zero", axis=alt.Axis(tickCount=5)), order="order:Q",
        color=base.color_by("part:N", {part.replace("_", " "): shade for part, shade in colors.items()}),
        tooltip=["phase:N", "part:N", alt.Tooltip("mib:Q", title="MiB", format=",.0f")],
    )  # fmt: skip
    changes: list[dict[str, Any]] = [
        {"position": round(100 * n / last, 2), "phase": after}
        for n, (before, after) in enumerate(pairwise(curve[PHASE]), start=1) if before != after
    ]  # fmt: skip
    lines = alt.Chart(base.inline_data(changes)).mark_rule(strokeDash=[4, 3], color=base.color("muted"))
    return alt.layer(areas, lines.encode(x=x, tooltip=["phase:N"])).properties(height=PREDICTED_HEIGHT)


def build_memory_trace(overview: Overview, traces: Sequence[RunTrace], *, kind: str) -> base.Figure | None:
    """Build the figure of ``gpu`` or ``cpu`` memory over time; None if it was not sampled."""
    sampled = [trace for trace in traces if trace.curves(kind)]
    if not sampled:
        return None
    nodes = sorted({curve.node for trace in sampled for curve in trace.curves(kind)})
    recorded = {interval.phase for trace in sampled for interval in trace.phases}
    phases = [phase for phase in base.PHASES if phase in recorded]
    highest = max(mib for trace in sampled for curve in trace.curves(kind) for _, mib in curve.points)
    titles = [trace.name + ("" if trace.row.completed else f": {trace.row.record.status}") for trace in sampled]
    charts = [_draw_memory(trace, kind, highest, nodes, phases) for trace in sampled]
    panels = tuple(map(base.Panel, titles, charts))
    shades = " Shades: phases of the run. White: its processes start or end." if phases else ""
    caption = f"Line: {MEMORY_LINES[kind]}.{shades} {base.describe_selection(overview, traces)}".strip()
    sentences = (*_highest_peak(sampled, kind), *_uneven_nodes(sampled, kind))
    title = f"{DEVICES[kind]} memory over time"
    lines = [base.LegendEntry(f"node {node}", f"c{n % base.MAX_COLORS + 1}", "line") for n, node in enumerate(nodes)]
    areas = [base.LegendEntry(phase, f"phase-{phase}", "area") for phase in phases]
    return base.Figure(
        f"{kind}_memory", title, panels, caption, sentences, legend=(*(lines if len(lines) > 1 else ()), *areas),
        finding=_find_phase(sampled, kind),
    )  # fmt: skip


def _find_phase(traces: Sequence[RunTrace], kind: str) -> str:
    """Return the phase in which the memory of all runs peaks; empty if they differ in it."""
    peaks = [
        max(counted, key=lambda peak: (peak.mib, -peak.second)) for trace in traces
        if (counted := [peak for peak in _peaks_of(trace, kind) if peak.counts(kind)])
    ]  # fmt: skip
    phases = {peak.phase for peak in peaks}
    if len(phases) != 1 or not (phase := phases.pop()):
        return ""
    size = f" at {peaks[0].mib:,.0f} MiB" if len(peaks) == 1 else " in all runs" if len(peaks) == len(traces) else ""
    return f"{DEVICES[kind]} memory peaks in the {phase} phase{size}"


def _draw_memory(
    trace: RunTrace, kind: str, highest: float, nodes: Sequence[int], phases: Sequence[str]
) -> alt.LayerChart:
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
    line = alt.Chart(base.inline_data(rows)).mark_line(strokeWidth=1.8, clip=True)
    lines = line.encode(x=x, y=y, tooltip=tooltip,
                        color=alt.Color("node:N", scale=alt.Scale(domain=domain), legend=legend))  # fmt: skip
    shades = [_shades(trace, phases)] if phases else []  # Vega cannot draw an empty list of colors.
    return alt.layer(*shades, lines).properties(height=170)


def _shades(trace: RunTrace, phases: Sequence[str]) -> alt.Chart:
    drawn = [one for one in trace.phases if one.phase in phases]
    rows: list[dict[str, Any]] = [{"phase": one.phase, "begin": one.begin_s, "end": one.end_s} for one in drawn]
    scale = alt.Scale(domain=list(phases), range=[base.color(f"phase-{phase}") for phase in phases])
    areas = alt.Chart(base.inline_data(rows)).mark_rect(opacity=0.17)
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
        return self.phase not in TRIAL_PHASES and self.second < min(profiles, default=math.inf)


def _peaks_of(trace: RunTrace, kind: str) -> Iterator[_Peak]:
    return (_Peak(trace, second, mib) for curve in trace.curves(kind) for second, mib in curve.points)


def _highest_peak(traces: Sequence[RunTrace], kind: str) -> Iterator[str]:
    """Describe the highest peak of all runs: when and in which phase it was first reached."""
    peaks = (peak for trace in traces for peak in _peaks_of(trace, kind))
    counted = [peak for peak in peaks if peak.counts(kind)]
    if not counted:
        return
    highest = max(counted, key=lambda peak: (peak.mib, -peak.second))
    during = f" in phase {highest.phase}" if highest.phase else ""
    yield f"Highest peak: {highest.mib:,.0f} MiB{during}, {highest.trace.name}."
    shared = [trace.row.label for trace in traces if any(map(is_shared_gpu, trace.row.record.memory["gpu"]))]
    if kind == GPU and shared:
        yield f"It contains the memory of other programs in {name_runs(shared)}, which the table leaves out."
    left_out = {interval.phase for trace in traces for interval in trace.phases} & {*TRIAL_PHASES, PROFILE}
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

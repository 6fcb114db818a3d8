"""Figures of a training step: where its time goes, its timeline, and the times of all steps."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import altair as alt

from distexp.config.overrides import join_first
from distexp.report.data import step_parts
from distexp.report.data.answer import short_name
from distexp.report.data.overview import Overview
from distexp.report.data.rows import run_label
from distexp.report.figures import base
from distexp.report.figures.labels import FEW_BARS, bar_height, label_axis
from distexp.report.traces import RunTrace
from distexp.runs.metrics import PARTS
from distexp.runs.step_files import RankStep, read_ranks

MAX_BARS = 24
MAX_SENTENCES = 8
CLEAR_SHARE = 0.1  # of the step, by which the parts of two runs must differ for a title
UNEVEN_STEPS = 1.2  # 90th percentile relative to the median
ROOM = 1.2  # of the axis, relative to the longest bar: for its label
MAX_RANKS = 8  # of all panels together: each has up to 1,200 marks
LANE_HEIGHT = 20  # pixels
KNOWN = {  # Colors of labels. Those of parts are as in the figure of where the step goes.
    PARTS["matmul"]: "c1", PARTS["other_kernels"]: "c2", PARTS["optimizer"]: "c7", PARTS["waiting"]: "c4",
    PARTS["data_wait"]: "c6",
    "forward": "phase-setup", "backward": "phase-save",
}  # fmt: skip

# Colors of all other labels, such as the collectives.
OTHERS = ("c3", "c5", "c8", "phase-search", "phase-warmup", "phase-eval")
ZOOM = "wheel![event.ctrlKey]"  # zoom with Ctrl only: without it the wheel scrolls the page


@dataclass(frozen=True)
class Bar:
    """A bar with its label: the step of a rank."""

    label: str
    run: step_parts.ProfiledRun
    step: RankStep


def build_step_breakdown(overview: Overview, traces: Sequence[RunTrace]) -> base.Figure | None:
    """Build the figure; None if no run was profiled."""
    runs = step_parts.profiled_runs(overview)
    if not runs:
        return None
    bars = _name_bars(overview, runs)
    shown = bars[:MAX_BARS]
    # Vega cannot draw an empty list of colors, as of a record whose parts are all 0.
    panels = (base.Panel("", _draw_breakdown(overview, runs, shown)),) if _colors(shown) else ()
    return base.Figure(
        "step_breakdown", "Where the step goes", panels, " ".join(_describe_breakdown(runs, len(bars))),
        tuple(_explain(overview, runs)), (step_parts.build_step_table(overview, runs),),
        tuple(base.LegendEntry(title, shade, "bar") for title, shade in _colors(bars).items()),
        finding=_find_largest(overview, runs),
    )  # fmt: skip


def _find_largest(overview: Overview, runs: Sequence[step_parts.ProfiledRun]) -> str:
    """Return the largest part of the step of the only run, or the part in which runs differ most."""
    shares = [{name: (run.slowest.parts[name] or 0.0) / run.slowest.step_ms for name in PARTS} for run in runs]
    if any(run.group.disturbance for run in runs):
        return ""
    if len(runs) == 1:
        name = max(shares[0], key=lambda name: shares[0][name])
        return f"{shares[0][name]:.0%} of the step is {PARTS[name]}"
    ends = {name: (min(share[name] for share in shares), max(share[name] for share in shares)) for name in PARTS}
    name = max(ends, key=lambda name: ends[name][1] - ends[name][0])
    low, high = ends[name]
    if high - low < CLEAR_SHARE:
        return ""
    most, least = (
        short_name(overview, next(run.group for run, share in zip(runs, shares, strict=True) if share[name] == end))
        for end in (high, low)
    )
    return f"{PARTS[name][:1].upper()}{PARTS[name][1:]}: {high:.0%} of the step of {most}, {low:.0%} of that of {least}"


def _describe_breakdown(runs: Sequence[step_parts.ProfiledRun], count: int) -> Iterator[str]:
    whose = "a rank" if len(runs) == 1 else "a run's slowest rank"
    yield f"A bar is the median profiled step of {whose}."
    unit = step_parts.bar_unit(runs)
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


def _explain(overview: Overview, runs: Sequence[step_parts.ProfiledRun]) -> Iterator[str]:
    explained = [run for run in runs if run.sentence]
    for run in explained[:MAX_SENTENCES]:
        yield f"R{overview.describe(run.group)[1:]}: {run.sentence}"
    if len(explained) > MAX_SENTENCES:
        yield f"{len(explained) - MAX_SENTENCES} more are in the records (metrics.explanation)."


def _name_bars(overview: Overview, runs: Sequence[step_parts.ProfiledRun]) -> list[Bar]:
    if len(runs) == 1:
        return [Bar(f"rank {step.rank}", runs[0], step) for step in runs[0].ranks]
    few = len(runs) <= FEW_BARS
    labels = [overview.describe(run.group, run.row.label) if few else run_label(run.row.label) for run in runs]
    return [Bar(label, run, run.slowest) for label, run in zip(labels, runs, strict=True)]


def _draw_breakdown(overview: Overview, runs: Sequence[step_parts.ProfiledRun], bars: Sequence[Bar]) -> alt.LayerChart:
    unit = step_parts.bar_unit(runs)
    names = [bar.label for bar in bars]
    lengths = [unit.convert(bar.run, bar.step.step_ms) for bar in bars]
    y = alt.Y("bar:N", sort=names, title=None, axis=label_axis(names), scale=alt.Scale(paddingInner=0.25))
    x = alt.X("ms:Q", title=unit.title, stack="zero", axis=alt.Axis(tickCount=6),
              scale=alt.Scale(domain=[0, ROOM * max(lengths)], nice=False))  # fmt: skip
    parts = alt.Chart(base.inline_data(list(_parts(overview, runs, bars)))).mark_bar().encode(
        x=x, y=y, color=base.color_by("part:N", _colors(bars)), order="order:Q",
        tooltip=["run:N", "rank:Q", "settings:N", "part:N",
                 alt.Tooltip("ms:Q", title=unit.title, format=",.3~f"),
                 alt.Tooltip("share:Q", title="of the step", format=".1%")],
    )  # fmt: skip
    totals = [
        {"bar": name, "ms": length, "text": f"{length:,.3g}"} for name, length in zip(names, lengths, strict=True)
    ]
    labels = alt.Chart(base.inline_data(totals)).mark_text(align="left", dx=5).encode(x="ms:Q", y=y, text="text:N")
    return alt.layer(parts, labels).properties(height=bar_height(names, 30) * len(bars))


def _colors(bars: Sequence[Bar]) -> dict[str, str]:
    return {
        title: "phase-save" if name == "bubble" else f"c{n}" for n, (name, title) in enumerate(PARTS.items(), start=1)
        if any(bar.step.parts[name] for bar in bars)
    }  # fmt: skip


def _parts(overview: Overview, runs: Sequence[step_parts.ProfiledRun], bars: Sequence[Bar]) -> Iterator[dict[str, Any]]:
    unit = step_parts.bar_unit(runs)
    for bar in bars:
        settings = overview.format_settings(bar.run.group)
        measured = [(title, ms) for name, title in PARTS.items() if (ms := bar.step.parts[name]) is not None]
        for order, (title, milliseconds) in enumerate(measured):
            yield {
                "bar": bar.label, "run": bar.run.row.label, "rank": bar.step.rank,
                "settings": settings, "part": title, "order": order,
                "ms": float(f"{unit.convert(bar.run, milliseconds):.5g}"),
                "share": round(milliseconds / bar.step.step_ms, 4),
            }  # fmt: skip


def build_step_timeline(overview: Overview, traces: Sequence[RunTrace]) -> base.Figure | None:
    """Build the figure; None if no run has the lanes of a step."""
    drawn = [trace for trace in traces if trace.lanes]
    if not drawn:
        return None
    chosen = [(trace, choose_ranks(trace, max(1, MAX_RANKS // len(drawn)))) for trace in drawn]
    colors = assign_colors(rank for _, ranks in chosen for rank in ranks)
    panels = tuple(
        base.Panel(
            trace.name, _draw_timeline(ranks, colors, f"zoom_{n}"), trace.profiles, _draw_timeline(ranks, colors)
        )
        for n, (trace, ranks) in enumerate(chosen)
    )
    legend = tuple(base.LegendEntry(label, shade, "bar") for label, shade in colors.items())
    caption = " ".join(_describe_timeline(chosen))
    return base.Figure("step_timeline", "Timeline of one step", panels, caption, legend=legend, is_wide=True)


def choose_ranks(trace: RunTrace, limit: int) -> list[step_parts.RankLanes]:
    """Return the ranks to draw: all, or the slowest and the fastest one without waiting, then the first ones."""
    if len(trace.lanes) <= limit:
        return list(trace.lanes)
    own = {times.rank: times.own_ms for times in read_ranks(trace.row.record)}
    by_time = sorted(trace.lanes, key=lambda lane: own.get(lane.rank, 0.0), reverse=True)
    first = [by_time[0].rank, by_time[-1].rank] if own else []
    order = dict.fromkeys([*first, *(lane.rank for lane in trace.lanes)])
    kept = set(list(order)[:limit])
    return [lane for lane in trace.lanes if lane.rank in kept]


def assign_colors(ranks: Iterator[step_parts.RankLanes]) -> dict[str, str]:
    """Return the color of each label: the known ones in their order, then the collectives and others."""
    labels = {span.label for rank in ranks for spans in rank.lanes.values() for span in spans}
    others = {label: OTHERS[n % len(OTHERS)] for n, label in enumerate(sorted(labels - set(KNOWN)))}
    return {label: shade for label, shade in KNOWN.items() if label in labels} | others


def _describe_timeline(chosen: Sequence[tuple[RunTrace, Sequence[step_parts.RankLanes]]]) -> Iterator[str]:
    yield "The median profiled step of each rank, from its start. Ctrl and the wheel zoom, a drag moves, a double"
    yield "click resets. This step includes the overhead of the profiler."
    if any(len(ranks) < len(trace.lanes) for trace, ranks in chosen):
        yield "Not all ranks are drawn, but the slowest one of each run is."


def _join_spans(spans: Sequence[step_parts.Span], gap_ms: float) -> Iterator[step_parts.Span]:
    """Yield spans of a chart that does not zoom: neighbors with one label are one span if the gap is not visible."""
    joined: step_parts.Span | None = None
    for span in spans:
        if joined is not None and joined.label == span.label and span.begin_ms - joined.end_ms < gap_ms:
            joined = step_parts.Span(joined.begin_ms, max(joined.end_ms, span.end_ms), span.label)
            continue
        if joined is not None and joined.end_ms - joined.begin_ms >= gap_ms / 2:
            yield joined
        joined = span
    if joined is not None:
        yield joined


def _draw_timeline(
    ranks: Sequence[step_parts.RankLanes], colors: dict[str, str], zoom_name: str = ""
) -> alt.LayerChart:
    """Draw the lanes. Without the name of a zoom, spans that are not visible without it are left out."""
    lanes: dict[str, Sequence[step_parts.Span]] = {}
    for n, rank in enumerate(ranks):
        if n:
            lanes[" " * n] = ()  # an empty lane between two ranks; names of a scale are unique
        lanes |= {f"rank {rank.rank} {title}": spans for title, spans in rank.lanes.items()}
    end = max(rank.step_ms for rank in ranks)
    if not zoom_name:
        lanes = {lane: tuple(_join_spans(spans, end / base.WIDE)) for lane, spans in lanes.items()}
    rows = (
        (lane, round(span.begin_ms, 3), round(span.end_ms, 3), span.label) for lane, spans in lanes.items()
        for span in spans
    )  # fmt: skip
    names = list(lanes)
    data = base.inline_table(("lane", "begin", "end", "label"), rows)
    x = alt.X("begin:Q", title="time in the step (ms)", scale=alt.Scale(domain=[0, end], nice=False),
              axis=alt.Axis(tickCount=8))  # fmt: skip
    y = alt.Y("lane:N", sort=names, title=None, axis=alt.Axis(ticks=False, domain=False, grid=False),
              scale=alt.Scale(domain=names, paddingInner=0.2))  # fmt: skip
    spans = alt.Chart(data).transform_calculate(ms="datum.end - datum.begin").mark_bar(clip=True).encode(
        x=x, x2="end:Q", y=y, color=base.color_by("label:N", colors),
    )  # fmt: skip
    if zoom_name:
        start = alt.Tooltip("begin:Q", title="start (ms)", format=",.3f")
        spans = spans.encode(
            tooltip=["lane:N", "label:N", start, alt.Tooltip("ms:Q", title="duration (ms)", format=",.3f")]
        )
        spans = spans.add_params(alt.selection_interval(name=zoom_name, bind="scales", encodings=["x"], zoom=ZOOM))
    return alt.layer(spans).properties(height=LANE_HEIGHT * len(names))


def build_step_times(overview: Overview, traces: Sequence[RunTrace]) -> base.Figure | None:
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
    counts = sorted({trace.row.settings.get("log_every") or 1 for trace in traces})
    thin = "one step" if counts == [1] else f"mean of {join_first(map(str, counts))} steps (train.log_every)"
    marks = f"Dot: median. Bar: up to the 90th percentile. Each thin line: {thin}. The first steps are left out."
    caption = f"{marks} {base.describe_selection(overview, traces)}".strip()
    panels = (base.Panel("", _draw_times(overview, traces, ticks, quantiles)),)
    finding = _find_uneven(traces)
    return base.Figure("step_times", "Step times", panels, caption, tuple(_data_wait(traces)), finding=finding)


def _find_uneven(traces: Sequence[RunTrace]) -> str:
    """Return whether the steps of the runs are even, or those of which run are not."""
    known = [(trace, trace.row.record.metrics.step_time_s or {}) for trace in traces]
    complete = [(trace, times) for trace, times in known if times.get("p50") and times.get("p90")]
    ratios = [(times["p90"] / times["p50"], trace.row.label) for trace, times in complete]
    if not ratios:
        return ""
    ratio, label = max(ratios, key=itemgetter(0))
    if ratio < UNEVEN_STEPS:
        return f"Steps are even: nine in ten take at most {max(0.0, ratio - 1):.0%} more than the median"
    return f"Steps of run {label} are uneven: one in ten takes at least {ratio:.1f} times the median"


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


def _draw_times(
    overview: Overview, traces: Sequence[RunTrace], ticks: base.Rows, quantiles: base.Rows
) -> alt.LayerChart:
    names, shades = [trace.name for trace in traces], base.group_colors(overview, [trace.group for trace in traces])
    # One line per setting: a phone has no room for them in one line.
    labels = alt.Axis(labelExpr="split(datum.label, ', ')", labelLimit=190, ticks=False, domain=False, grid=False)
    lines = max(name.count(", ") + 1 for name in names)
    y = alt.Y("run:N", sort=names, title=None, axis=labels)
    x = alt.X("ms:Q", title="step time (ms)", scale=alt.Scale(zero=True), axis=alt.Axis(tickCount=6))
    thin = alt.Chart(base.inline_data(ticks)).mark_tick(thickness=1.5, opacity=0.45, size=16).encode(
        x=x, y=y, color=alt.Color("run:N", scale=alt.Scale(domain=names, range=shades), legend=None),
        tooltip=["run:N", alt.Tooltip("ms:Q", format=",.2f")],
    )  # fmt: skip
    marks = [thin, *(_quantile_marks(quantiles, y) if quantiles else ())]
    return alt.layer(*marks).properties(height=max(34, 14 * lines + 10) * len(names))


def _quantile_marks(quantiles: base.Rows, y: alt.Y) -> list[alt.Chart]:
    tooltip = ["run:N", *(alt.Tooltip(f"{key}:Q", title=f"{key} ms", format=",.2f") for key in ("p50", "p90", "max"))]
    chart = alt.Chart(base.inline_data(quantiles)).encode(y=y, tooltip=tooltip)
    ink = {"color": base.color("ink"), "opacity": 1}
    return [
        chart.mark_rule(strokeWidth=2, color=base.color("ink")).encode(x=alt.X("p50:Q"), x2="p90:Q"),
        chart.mark_point(filled=True, size=70, **ink).encode(x="p50:Q"),
        chart.mark_point(shape="stroke", angle=90, size=160, strokeWidth=2, **ink).encode(x="p90:Q"),
    ]


def _data_wait(traces: Sequence[RunTrace]) -> Iterator[str]:
    """Name the run that waited longest for data, relative to its runtime."""
    waits = [
        (metrics.data_wait_s / metrics.train_runtime, row.label)
        for row, metrics in ((trace.row, trace.row.record.metrics) for trace in traces)
        if metrics.data_wait_s is not None and metrics.train_runtime
    ]
    if waits:
        share, slowest = max(waits, key=itemgetter(0))
        yield f"Longest wait for data: {share:.1%} of the runtime, run {slowest}."

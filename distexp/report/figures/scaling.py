"""Scaling with the number of workers: speedup or time, and efficiency, next to the ideal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt

from distexp.report.data.forecasts import ForecastCurve, build_forecast_table, find_curves, find_forecasts
from distexp.report.data.metrics import SPEED
from distexp.report.data.overview import Overview
from distexp.report.data.scaling import FORECAST, ScalingPoint, ScalingSeries
from distexp.report.figures.base import Figure, Panel
from distexp.report.figures.scaling_forecast import draw_forecasts, forecast_rows
from distexp.report.figures.scaling_table import build_nodes_table, build_scaling_table
from distexp.report.figures.theme import MAX_COLORS, color, inline_data
from distexp.report.traces import RunTrace
from distexp.statistics.noise import is_within_noise

KINDS = ("strong", "weak", "mixed", FORECAST)
NOT_CONSTANT = "neither the total work nor the work per worker is constant"
MAX_SENTENCES = 6
Rows = list[dict[str, Any]]


def build_scaling(overview: Overview, traces: Sequence[RunTrace]) -> Figure | None:
    """Build the figure; None if no configuration ran on several numbers of workers or nodes, or has forecasts.

    Runs with equal numbers of workers on few and on many nodes have a table, but no curve.
    """
    forecasts = find_forecasts(overview)
    curves = find_curves(overview, forecasts)
    added = [curve.series for curve in curves if curve.series.kind == FORECAST]
    if not overview.series and not forecasts:
        return None
    ordered = sorted([*overview.series, *added], key=lambda series: KINDS.index(series.kind))
    titles = dict.fromkeys(series.title for series in ordered)
    panels = tuple(
        panel for title in titles for panel in _panels([series for series in ordered if series.title == title], curves)
    )
    built = (build_scaling_table(overview), build_nodes_table(overview), build_forecast_table(forecasts))
    known = [series for series in overview.series if series.has_several_sizes and not series.is_disturbed]
    sentences = [text for series in known for text in _describe(series)]
    caption = _caption(overview, has_forecasts=bool(curves)) if panels else ""
    tables = tuple(table for table in built if table)
    return Figure("scaling", "Scaling", panels, caption, tuple(sentences[:MAX_SENTENCES]), tables)


def _caption(overview: Overview, *, has_forecasts: bool) -> str:
    mixed = dict.fromkeys(series.title for series in overview.series if series.kind == "mixed")
    forecast = ["Dashed with rings: forecast, in the band of its interval."] if has_forecasts else []
    return " ".join(["Dashed gray line: ideal.", *forecast, *(f"{title}: {NOT_CONSTANT}." for title in mixed)])


def _describe(series: ScalingSeries) -> Iterator[str]:
    """Compare the most workers with the fewest."""
    first, last = series.baseline, series.points[-1]
    ratio = last.workers / first.workers
    name = f" ({series.name})" if series.name else ""
    if series.kind == "mixed":
        total = last.work / first.work
        result = f"total work {total:.2f}x, work per worker {total / ratio:.2f}x"
    else:
        what = "as fast" if series.kind == "strong" else "the work per second"
        result = f"{last.speedup:.2f}x {what} (ideal: {ratio:g}x)"
    span = f"{first.workers} to {last.workers} workers"
    yield f"{series.title}{name}, {span}: {result}, efficiency {last.efficiency:.0%}."
    best = max(series.points, key=lambda point: point.speedup)
    if series.kind == "strong" and best.workers < last.workers and not _are_equal(best, last):
        yield f"{best.workers} workers are faster than {last.workers}: {best.speedup:.2f}x."


def _are_equal(one: ScalingPoint, other: ScalingPoint) -> bool:
    """Return whether two speeds are equal within the noise."""
    speed, other_speed = one.group.metric(SPEED), other.group.metric(SPEED)
    return bool(speed and other_speed and is_within_noise(speed, other_speed))


def _panels(series: Sequence[ScalingSeries], curves: Sequence[ForecastCurve]) -> Iterator[Panel]:
    """Yield the panels of one kind of scaling; none if no series of this kind has several sizes or a forecast."""
    kind, title, drawn = series[0].kind, series[0].title, series[:MAX_COLORS]
    rows = [row for drawn_series in drawn for row in _rows(drawn_series)]
    forecasts = [row for curve in curves if curve.series in drawn for row in forecast_rows(curve)]
    measured = sorted({row["workers"] for row in rows})
    workers = sorted({*measured, *(row["workers"] for row in forecasts)})
    if len(workers) < 2:
        return
    if kind in ("strong", FORECAST):
        speedups = [n / workers[0] for n in workers]
        # On two logarithmic axes the ideal speedup is a straight line.
        y = alt.Y("speedup:Q", title="speedup", axis=alt.Axis(values=speedups, format="~g"),
                  scale=alt.Scale(type="log", base=2, nice=False, padding=14))  # fmt: skip
        yield Panel(f"{title}: speedup", _draw(rows, forecasts, y, workers, speedups))
    if kind == "weak":
        y = alt.Y("relative_time:Q", title="time / time of the fewest workers", scale=alt.Scale(zero=True))
        yield Panel(f"{title}: relative time", _draw(rows, forecasts, y, workers, [1.0] * len(workers)))
    y = alt.Y("efficiency:Q", title="efficiency (%)", scale=alt.Scale(zero=True))
    yield Panel(f"{title}: efficiency", _draw(rows, forecasts, y, workers, [100.0] * len(workers)))


def _rows(series: ScalingSeries) -> Rows:
    """Return the data of a series, with separate lines for one node and for several if both ran equal workers."""
    split = any(True for _ in series.node_pairs())
    rows = [_row(series, point, _line(point, split=split)) for point in series.points]
    if split and series.baseline.nodes == 1:  # both lines start at the baseline
        rows.insert(0, _row(series, series.baseline, "several nodes"))
    return rows


def _line(point: ScalingPoint, *, split: bool) -> str:
    if not split:
        return "all"
    return "several nodes" if point.nodes > 1 else "one node"


def _row(series: ScalingSeries, point: ScalingPoint, line: str) -> dict[str, Any]:
    return {
        "series": series.name or "all", "line": line, "run": point.group.label,
        "workers": point.workers, "nodes": point.nodes, "speed": round(point.speed, 2),
        "speedup": round(point.speedup, 4), "relative_time": round(point.relative_time, 4),
        "efficiency": round(100 * point.efficiency, 2),
    }  # fmt: skip


def _draw(rows: Rows, forecasts: Rows, y: alt.Y, workers: Sequence[int], ideal: Sequence[float]) -> alt.LayerChart:
    scale = alt.Scale(type="log", base=2, domain=[workers[0], workers[-1]], nice=False, padding=14)
    x = alt.X("workers:Q", title="workers", scale=scale, axis=alt.Axis(values=list(workers), format="d", grid=False))
    base = alt.Chart(inline_data(rows)).encode(x=x, y=y, tooltip=_tooltip(), **_styles(rows))
    target = [{"workers": n, "ideal": value} for n, value in zip(workers, ideal, strict=True)]
    line = alt.Chart(inline_data(target)).mark_line(strokeDash=[6, 4], strokeWidth=1.5, color=color("muted"))
    label = alt.Chart(inline_data(target[-1:])).mark_text(align="right", dy=-8, fontStyle="italic")
    return alt.layer(
        line.encode(x=x, y="ideal:Q"), label.encode(x=x, y="ideal:Q", text=alt.value("ideal")),
        *draw_forecasts(forecasts, x, y), base.mark_line(), base.mark_point(filled=True, size=60),
    ).properties(height=280)  # fmt: skip


def _styles(rows: Rows) -> dict[str, Any]:
    """Return the encodings of color (series) and dash (one node or several)."""
    names = list(dict.fromkeys(row["series"] for row in rows))
    lines = sorted({row["line"] for row in rows})
    dashes = [[1, 0], [3, 3]] if "several nodes" in lines else [[1, 0]]
    legend = alt.Legend(title=None, columns=1, labelLimit=alt.ExprRef("width - 24"))
    dash_legend = alt.Legend(title=None, direction="horizontal", symbolType="stroke", symbolSize=250)
    return {
        "color": alt.Color("series:N", scale=alt.Scale(domain=names),
                           legend=legend if len(names) > 1 else None),
        "strokeDash": alt.StrokeDash("line:N", scale=alt.Scale(domain=lines, range=dashes),
                                     legend=dash_legend if len(lines) > 1 else None),
    }  # fmt: skip


def _tooltip() -> list[Any]:
    return [
        "run:N", "series:N", "workers:Q", "nodes:Q", alt.Tooltip("speed:Q", title="samples/s", format=",.1f"),
        alt.Tooltip("speedup:Q", format=".2f"), alt.Tooltip("efficiency:Q", title="efficiency %", format=".1f"),
    ]  # fmt: skip

"""Scaling with the number of workers: measured and forecast, next to the ideal, and tables of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import altair as alt

from distexp.report.data.answer import describe_scaling
from distexp.report.data.forecasts import ForecastCurve, build_forecast_table, find_curves, find_forecasts
from distexp.report.data.metrics import COMMUNICATION, EXPOSED, MEMORIES, SPEED
from distexp.report.data.overview import Overview, memory_metric
from distexp.report.data.scaling_series import FORECAST, ScalingPoint, ScalingSeries, parameters_of
from distexp.report.figures.base import MAX_COLORS, Figure, Panel, Rows, color, group_colors, inline_data
from distexp.report.traces import RunTrace
from distexp.statistics.noise import is_within_noise
from distexp.tables.columns import TextTable

KINDS = ("strong", "weak", "mixed", FORECAST)
NOT_CONSTANT = "neither the total work nor the work per worker is constant"
MAX_SENTENCES = 6
OPACITY = 0.18
MAX_ROWS = 40
SHAPE = "nodes x workers per node"
Read = Callable[[ScalingSeries, ScalingPoint], str]


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
    alike = [[series for series in ordered if series.title == title] for title in titles]
    panels = tuple(panel for series in alike for panel in _panels(overview, series, curves))
    built = (build_scaling_table(overview), build_nodes_table(overview), build_forecast_table(forecasts))
    known = [series for series in overview.series if series.has_several_sizes and not series.is_disturbed]
    sentences = [text for series in known for text in _describe(series)]
    mixed = dict.fromkeys(series.title for series in overview.series if series.kind == "mixed")
    forecast = ["Dashed with rings: forecast, in the band of its interval."] if curves else []
    caption = " ".join(["Dashed gray line: ideal.", *forecast, *(f"{title}: {NOT_CONSTANT}." for title in mixed)])
    tables = tuple(table for table in built if table)
    sentences = sentences[:MAX_SENTENCES]
    caption, finding = caption if panels else "", describe_scaling(overview.series)
    return Figure("scaling", "Scaling", panels, caption, tuple(sentences), tables, finding=finding)


def _describe(series: ScalingSeries) -> Iterator[str]:
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
    speed, other_speed = one.group.metric(SPEED), other.group.metric(SPEED)
    return bool(speed and other_speed and is_within_noise(speed, other_speed))


def _panels(overview: Overview, series: Sequence[ScalingSeries], curves: Sequence[ForecastCurve]) -> Iterator[Panel]:
    """Yield the panels of one kind of scaling; none if no series of this kind has several sizes or a forecast."""
    kind, title, drawn = series[0].kind, series[0].title, series[:MAX_COLORS]
    rows = [row for drawn_series in drawn for row in _rows(drawn_series)]
    forecasts = [row for curve in curves if curve.series in drawn for row in forecast_rows(curve)]
    measured = sorted({row["workers"] for row in rows})
    workers = sorted({*measured, *(row["workers"] for row in forecasts)})
    if len(workers) < 2:
        return
    names = [one.name or "all" for one in drawn]
    shades = dict(zip(names, group_colors(overview, [one.baseline.group for one in drawn]), strict=True))
    if kind in ("strong", FORECAST):
        speedups = [n / workers[0] for n in workers]
        # On two logarithmic axes the ideal speedup is a straight line.
        y = alt.Y("speedup:Q", title="speedup", axis=alt.Axis(values=speedups, format="~g"),
                  scale=alt.Scale(type="log", base=2, nice=False, padding=14))  # fmt: skip
        yield Panel(f"{title}: speedup", _draw(rows, forecasts, y, dict(zip(workers, speedups, strict=True)), shades))
    if kind == "weak":
        y = alt.Y("relative_time:Q", title="time / time of the fewest workers", scale=alt.Scale(zero=True))
        yield Panel(f"{title}: relative time", _draw(rows, forecasts, y, dict.fromkeys(workers, 1.0), shades))
    y = alt.Y("efficiency:Q", title="efficiency (%)", scale=alt.Scale(zero=True))
    yield Panel(f"{title}: efficiency", _draw(rows, forecasts, y, dict.fromkeys(workers, 100.0), shades))


def _rows(series: ScalingSeries) -> Rows:
    """Return the data of a series, with separate lines for one node and for several if both ran equal workers."""
    split = any(True for _ in series.node_pairs())
    lines = ["all" if not split else "several nodes" if point.nodes > 1 else "one node" for point in series.points]
    rows = [_row(series, point, line) for point, line in zip(series.points, lines, strict=True)]
    if split and series.baseline.nodes == 1:  # both lines start at the baseline
        rows.insert(0, _row(series, series.baseline, "several nodes"))
    return rows


def _row(series: ScalingSeries, point: ScalingPoint, line: str) -> dict[str, Any]:
    return {
        "series": series.name or "all", "line": line, "run": point.group.label,
        "workers": point.workers, "nodes": point.nodes, "speed": round(point.speed, 2),
        "speedup": round(point.speedup, 4), "relative_time": round(point.relative_time, 4),
        "efficiency": round(100 * point.efficiency, 2),
    }  # fmt: skip


def _draw(
    rows: Rows, forecasts: Rows, y: alt.Y, ideal: Mapping[int, float], shades: Mapping[str, str]
) -> alt.LayerChart:
    scale = alt.Scale(type="log", base=2, domain=[min(ideal), max(ideal)], nice=False, padding=14)
    x = alt.X("workers:Q", title="workers", scale=scale, axis=alt.Axis(values=list(ideal), format="d", grid=False))
    base = alt.Chart(inline_data(rows)).encode(x=x, y=y, tooltip=_tooltip(), **_styles(rows, shades))
    target = [{"workers": n, "ideal": value} for n, value in ideal.items()]
    line = alt.Chart(inline_data(target)).mark_line(strokeDash=[6, 4], strokeWidth=1.5, color=color("muted"))
    label = alt.Chart(inline_data(target[-1:])).mark_text(align="right", dy=-8, fontStyle="italic")
    return alt.layer(
        line.encode(x=x, y="ideal:Q"), label.encode(x=x, y="ideal:Q", text=alt.value("ideal")),
        *draw_forecasts(forecasts, x, y), base.mark_line(), base.mark_point(filled=True, size=60),
    ).properties(height=280)  # fmt: skip


def _styles(rows: Rows, shades: Mapping[str, str]) -> dict[str, Any]:
    names = list(shades)
    lines = sorted({row["line"] for row in rows})
    dashes = [[1, 0], [3, 3]] if "several nodes" in lines else [[1, 0]]
    legend = alt.Legend(title=None, columns=1, labelLimit=alt.ExprRef("width - 24"))
    dash_legend = alt.Legend(title=None, direction="horizontal", symbolType="stroke", symbolSize=250)
    return {
        "color": alt.Color("series:N", scale=alt.Scale(domain=names, range=list(shades.values())),
                           legend=legend if len(names) > 1 else None),
        "strokeDash": alt.StrokeDash("line:N", scale=alt.Scale(domain=lines, range=dashes),
                                     legend=dash_legend if len(lines) > 1 else None),
    }  # fmt: skip


def _tooltip() -> list[Any]:
    return [
        "run:N", "series:N", "workers:Q", "nodes:Q", alt.Tooltip("speed:Q", title="samples/s", format=",.1f"),
        alt.Tooltip("speedup:Q", format=".2f"), alt.Tooltip("efficiency:Q", title="efficiency %", format=".1f"),
    ]  # fmt: skip


def forecast_rows(curve: ForecastCurve) -> list[dict[str, Any]]:
    """Return the data of a curve. Each metric has its value and both ends of its interval."""
    rows = []
    for forecast in curve.forecasts:
        ends = {
            "": curve.efficiency(forecast, forecast.step_time_s),
            "_low": curve.efficiency(forecast, forecast.high_s),
            "_high": curve.highest_efficiency(forecast),
        }
        row: dict[str, Any] = {
            "series": curve.series.name or "all", "run": curve.row.label, "workers": forecast.workers,
            "nodes": forecast.nodes, "speed": round(curve.speed(forecast, forecast.step_time_s), 2),
        }  # fmt: skip
        for end, efficiency in ends.items():
            row[f"speedup{end}"] = round(efficiency * forecast.workers / curve.series.baseline.workers, 4)
            row[f"efficiency{end}"] = round(100 * efficiency, 2)
            row[f"relative_time{end}"] = round(1 / efficiency, 4)
        rows.append(row)
    return rows


def draw_forecasts(rows: Sequence[dict[str, Any]], x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """Return the layers of the forecasts on the axes of a panel; none without forecasts."""
    if not rows:
        return []
    metric = str(y.to_dict()["field"])
    title = y.to_dict()["title"]
    names = list(dict.fromkeys(row["series"] for row in rows))
    colors = alt.Color("series:N", legend=None) if len(names) < 2 else alt.Color("series:N")
    ends = [alt.Tooltip(f"{metric}{end}:Q", format=".2f") for end in ("", "_low", "_high")]
    tooltip = ["run:N", "series:N", "workers:Q", "nodes:Q", alt.Tooltip("speed:Q", title="samples/s", format=",.1f")]
    base = alt.Chart(inline_data(list(rows))).encode(x=x, tooltip=[*tooltip, *ends])
    low, high = alt.Y(f"{metric}_low:Q", title=title), alt.Y2(f"{metric}_high")
    value = base.encode(y=alt.Y(f"{metric}:Q", title=title), color=colors)
    return [
        base.mark_area(fillOpacity=OPACITY, opacity=1).encode(y=low, y2=high, color=colors),
        value.mark_line(strokeDash=[5, 4]),
        value.mark_point(filled=False, size=55),
    ]


def build_scaling_table(overview: Overview) -> TextTable | None:
    """Build the table with a row per training of a series; None if nothing was scaled."""
    points = [(series, point) for series in overview.series for point in series.points]
    if not points:
        return None
    columns = {title: [read(*point) for point in points] for title, read in _columns(overview).items()}
    more = f"{len(points) - MAX_ROWS} more rows are in results.csv." if len(points) > MAX_ROWS else ""
    table = TextTable.from_columns("Work, efficiency and memory", columns, more)
    return replace(table, rows=table.rows[:MAX_ROWS])


def _columns(overview: Overview) -> dict[str, Read]:
    def work_of(series: ScalingSeries) -> float:
        return series.baseline.work / series.baseline.workers

    memory = memory_metric(overview) or ""
    average = {"gpu_peak_mib": "gpu_training_average_mib", "cpu_peak_mib": "cpu_training_average_mib"}.get(memory, "")
    peak_title = MEMORIES.get(memory, "memory")
    return {
        "configuration": lambda series, point: f"{series.name} ({series.title})" if series.name else series.title,
        SHAPE: lambda series, point: _shape(point),
        "parameters": lambda series, point: f"{count:,}" if (count := parameters_of(point.group)) else "-",
        "samples per worker": lambda series, point: (
            "-" if point.samples is None else f"{point.samples / point.workers:,.0f}"
        ),
        "relative work per worker": lambda series, point: f"{point.work / point.workers / work_of(series):.2f}",
        "time (s)": lambda series, point: "-" if point.samples is None else f"{point.time:,.2f}",
        "samples/s": lambda series, point: f"{point.speed:,.1f}",
        "speedup": lambda series, point: f"{point.speedup:.2f}",
        "efficiency": lambda series, point: f"{point.efficiency:.0%}",
        f"{peak_title} (MiB)": lambda series, point: _metric(point, memory),
        f"{peak_title.replace('peak', 'average')} (MiB)": lambda series, point: _metric(point, average),
        "communication (%)": lambda series, point: _metric(point, COMMUNICATION),
        "not overlapped (%)": lambda series, point: _metric(point, EXPOSED),
    }


def _metric(point: ScalingPoint, name: str) -> str:
    value = point.group.metric(name) if name else None
    return "-" if value is None else f"{value.mean:,.0f}"


def build_nodes_table(overview: Overview) -> TextTable | None:
    """Compare equal numbers of workers on few nodes and on more; None if there are none."""
    rows = tuple(
        (
            series.name or "-", str(few.workers), _shape(few), f"{few.speed:,.1f}", _shape(more), f"{more.speed:,.1f}",
            f"{more.speed / few.speed:.2f}{' (within noise)' if _are_equal(few, more) else ''}",
        )
        for series in overview.series for few, more in series.node_pairs()
    )  # fmt: skip
    if not rows:
        return None
    header = ("configuration", "workers", f"few: {SHAPE}", "samples/s", f"more: {SHAPE}", "samples/s", "more / few")
    return TextTable("Equal numbers of workers on few nodes and on more", header, rows)


def _shape(point: ScalingPoint) -> str:
    return f"{point.nodes} x {point.workers // point.nodes}"

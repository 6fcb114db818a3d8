"""Tables of the scaling figure: work and efficiency, and equal numbers of workers on few and on many nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from distexp.report.data.metrics import COMMUNICATION, EXPOSED, MEMORIES, SPEED
from distexp.report.data.overview import Overview
from distexp.report.data.ranking import memory_metric
from distexp.report.data.scaling import ScalingPoint, ScalingSeries
from distexp.statistics.noise import is_within_noise
from distexp.tables.text_table import TextTable

MAX_ROWS = 40
SHAPE = "nodes x workers per node"
AVERAGES = {"gpu_peak_mib": "gpu_training_average_mib", "cpu_peak_mib": "cpu_training_average_mib"}
Read = Callable[[ScalingSeries, ScalingPoint], str]


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
    memory = memory_metric(overview) or ""
    average = AVERAGES.get(memory, "")
    peak_title = MEMORIES.get(memory, "memory")
    return {
        "configuration": lambda series, point: f"{series.name} ({series.title})" if series.name else series.title,
        SHAPE: lambda series, point: _shape(point),
        "parameters": lambda series, point: _parameters(point),
        "samples per worker": lambda series, point: _samples(point),
        "relative work per worker": lambda series, point: f"{_relative_work(series, point):.2f}",
        "time (s)": lambda series, point: "-" if point.samples is None else f"{point.time:,.2f}",
        "samples/s": lambda series, point: f"{point.speed:,.1f}",
        "speedup": lambda series, point: f"{point.speedup:.2f}",
        "efficiency": lambda series, point: f"{point.efficiency:.0%}",
        f"{peak_title} (MiB)": lambda series, point: _metric(point, memory),
        f"{peak_title.replace('peak', 'average')} (MiB)": lambda series, point: _metric(point, average),
        "communication (%)": lambda series, point: _metric(point, COMMUNICATION),
        "not overlapped (%)": lambda series, point: _metric(point, EXPOSED),
    }


def _parameters(point: ScalingPoint) -> str:
    built = point.group.counted_rows[0].record.built
    return f"{built.parameters:,}" if built else "-"


def _samples(point: ScalingPoint) -> str:
    return "-" if point.samples is None else f"{point.samples / point.workers:,.0f}"


def _relative_work(series: ScalingSeries, point: ScalingPoint) -> float:
    first = series.baseline
    return point.work / point.workers / (first.work / first.workers)


def _metric(point: ScalingPoint, name: str) -> str:
    value = point.group.metric(name) if name else None
    return "-" if value is None else f"{value.mean:,.0f}"


def build_nodes_table(overview: Overview) -> TextTable | None:
    """Compare equal numbers of workers on few nodes and on more; None if there are none."""
    rows = tuple(
        (
            series.name or "-", str(few.workers), _shape(few), f"{few.speed:,.1f}", _shape(more), f"{more.speed:,.1f}",
            f"{more.speed / few.speed:.2f}{_noise(few, more)}",
        )
        for series in overview.series for few, more in series.node_pairs()
    )  # fmt: skip
    if not rows:
        return None
    header = ("configuration", "workers", f"few: {SHAPE}", "samples/s", f"more: {SHAPE}", "samples/s", "more / few")
    return TextTable("Equal numbers of workers on few nodes and on more", header, rows)


def _noise(few: ScalingPoint, more: ScalingPoint) -> str:
    one, other = few.group.metric(SPEED), more.group.metric(SPEED)
    return " (within noise)" if one and other and is_within_noise(one, other) else ""


def _shape(point: ScalingPoint) -> str:
    return f"{point.nodes} x {point.workers // point.nodes}"

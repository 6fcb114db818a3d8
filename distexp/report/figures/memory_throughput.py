"""Memory against throughput: one point per training, the Pareto front, and runs out of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import altair as alt

from distexp.report.data.metrics import MEMORIES, SPEED
from distexp.report.data.overview import Overview
from distexp.report.data.ranking import memory_metric, pareto_fronts
from distexp.report.data.repeats import RunGroup
from distexp.report.data.settings import MAX_LENGTH, format_setting
from distexp.report.figures.base import SINGLE_WIDTH, Figure, Panel
from distexp.report.figures.label_placement import Frame, is_shown, place_labels
from distexp.report.figures.offload_table import build_offload_table
from distexp.report.figures.theme import MOST_COLORS, color, inline_data
from distexp.report.traces import RunTrace

MOST_LABELS = 16
CROWD = 200  # points; more are drawn small and pale
CLOSE = 0.1  # relative; an axis that shows less would make small differences look large
HEIGHT = 340  # pixels
MARGIN = 0.06  # of the axes, relative to the values
SHAPES = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross"]
FRONT = "Pareto front"
FRONT_DASH = [5, 4]
LEGEND_COLUMNS = alt.ExprRef("width < 420 ? 2 : 4")
Rows = list[dict[str, Any]]


def build_memory_throughput(overview: Overview, traces: Sequence[RunTrace]) -> Figure | None:
    """Build the figure; None if no memory was measured."""
    memory = memory_metric(overview)
    chart = _draw(overview, memory) if memory else None
    if chart is None or memory is None:
        return None
    offload = build_offload_table(overview, memory)
    return Figure(
        "memory_throughput", "Memory against throughput", (Panel("", chart),), _caption(overview, memory),
        tables=(offload,) if offload else (),
    )  # fmt: skip


def _caption(overview: Overview, memory: str) -> str:
    parts = [
        "Pareto front: no other run is both smaller and faster.",
        "Differences within the noise do not count." if _knows_noise(overview) else "",
        "Labels: runs of the table, if there is room." if _has_labels(overview, memory) else "",
        "Red crosses: runs out of memory, at their peak." if _out_of_memory(overview, memory) else "",
    ]
    return " ".join(filter(None, parts))


def _knows_noise(overview: Overview) -> bool:
    return any(speed.noise is not None for group in overview.groups if (speed := group.metric(SPEED)))


def _has_labels(overview: Overview, memory: str) -> bool:
    return len(_measured(overview, memory)) <= MOST_LABELS


def _measured(overview: Overview, memory: str) -> list[RunGroup]:
    return [group for group in overview.groups if group.completed and group.metric(memory) and group.metric(SPEED)]


def _out_of_memory(overview: Overview, memory: str) -> list[RunGroup]:
    """Return the groups that ran out of memory and have a peak."""
    return [group for group in overview.groups
            if "oom" in group.status and not group.completed and group.metric(memory)]  # fmt: skip


def _draw(overview: Overview, memory: str) -> alt.LayerChart | None:
    channels = _Channels(overview)
    points = [channels.point(group, memory) for group in _measured(overview, memory)]
    if not points:
        return None
    failed = [{**channels.point(group, memory), "speed": 0.0} for group in _out_of_memory(overview, memory)]
    frame = _frame(points + failed)
    scales = [alt.Scale(domain=list(ends), nice=False, zero=False) for ends in (frame.x, frame.y)]
    x = alt.X("memory:Q", title=f"{MEMORIES[memory]} (MiB)", scale=scales[0], axis=alt.Axis(tickCount=8))
    y = alt.Y("speed:Q", title="samples/s", scale=scales[1])
    front = [
        {**channels.point(group, memory), "front": n, "line": FRONT}
        for n, groups in enumerate(pareto_fronts(overview, memory)) for group in groups
    ]  # fmt: skip
    crowd = len(points) > CROWD
    base = alt.Chart(inline_data(points))
    marks = base.mark_point(filled=True, size=25 if crowd else 90, opacity=0.5 if crowd else 0.9, strokeWidth=0).encode(
        x=x, y=y, tooltip=_tooltip(), **channels.encodings(points)
    )
    layers: list[Any] = [_front_line(front, x, y), marks]
    if _has_labels(overview, memory):
        layers += _labels(points, failed, front, frame, x=x, y=y)
    return alt.layer(*layers, *_crosses(failed, x, y)).properties(height=HEIGHT)


def _labels(points: Rows, failed: Rows, front: Rows, frame: Frame, **axes: Any) -> Iterator[alt.Chart]:
    """Yield the labels with their runs, a layer for each place next to a mark."""
    fronts = [list(steps) for _, steps in groupby(front, key=lambda point: point["front"])]
    for place, rows in place_labels(points, failed, fronts, frame).items():
        if rows:
            labels = alt.Chart(inline_data(rows)).mark_text(align=place.align, dx=place.dx, dy=place.dy)
            yield labels.encode(**axes, text="run:N", opacity=is_shown())


def _frame(rows: Rows) -> Frame:
    """Return the axes. That of the memory is at least 20 % wide, and that of the speed starts at 0."""
    sizes = [row["memory"] for row in rows]
    low, high = min(sizes), max(sizes)
    margin = CLOSE * high if high - low < CLOSE * high else MARGIN * (high - low)
    fastest = max(row["speed"] for row in rows)
    return Frame((max(0.0, low - margin), high + margin), (0.0, (1 + MARGIN) * fastest), SINGLE_WIDTH, HEIGHT)


def _front_line(front: Rows, x: alt.X, y: alt.Y) -> alt.Chart:
    legend = alt.Legend(title=None, symbolType="stroke", symbolSize=250, symbolDash=FRONT_DASH)
    dash = alt.StrokeDash("line:N", scale=alt.Scale(domain=[FRONT], range=[FRONT_DASH]), legend=legend)
    line = alt.Chart(inline_data(front)).mark_line(interpolate="step-after", strokeWidth=1.5, color=color("muted"))
    return line.encode(x=x, y=y, detail="front:N", strokeDash=dash)


def _crosses(failed: list[dict[str, Any]], x: alt.X, y: alt.Y) -> list[Any]:
    """Draw a cross on the memory axis for each run out of memory, at the peak it reached."""
    if not failed:
        return []
    base = alt.Chart(inline_data(failed)).encode(x=x, y=y, tooltip=_tooltip())
    cross = base.mark_point(shape="M-.5 -.5L.5 .5M.5 -.5L-.5 .5", size=160, strokeWidth=2.5, color=color("bad"))
    if len(failed) > MOST_LABELS:
        return [cross]
    return [cross, base.mark_text(dy=-14, color=color("bad"), fontWeight=600).encode(text=alt.value("OOM"))]


def _tooltip() -> list[alt.Tooltip]:
    return [
        alt.Tooltip("run:N"), alt.Tooltip("settings:N"), alt.Tooltip("status:N"),
        alt.Tooltip("memory:Q", title="MiB", format=",.0f"), alt.Tooltip("speed:Q", title="samples/s", format=",.1f"),
    ]  # fmt: skip


class _Channels:
    """The two settings shown as color and shape: the first ones with few enough values."""

    def __init__(self, overview: Overview) -> None:
        def count(name: str) -> int:
            return len({format_setting(group.setting(name)) for group in overview.groups})

        self.overview = overview
        self.color = next((name for name in overview.varied if 2 <= count(name) <= MOST_COLORS), None)
        others = (name for name in overview.varied if name != self.color and 2 <= count(name) <= len(SHAPES))
        self.shape = next(others, None)

    def point(self, group: RunGroup, memory: str) -> dict[str, Any]:
        """Return the data of a point."""
        size, speed = group.metric(memory), group.metric(SPEED)
        return {
            "run": group.label,
            "settings": self.overview.format_settings(group) or group.label,
            "memory": size and round(size.mean, 1),
            "speed": speed and round(speed.mean, 3),
            "status": group.status,
            "color": self.color and format_setting(group.setting(self.color), MAX_LENGTH),
            "shape": self.shape and format_setting(group.setting(self.shape), MAX_LENGTH),
        }

    def encodings(self, points: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the encodings of color and shape, with legends."""
        found: dict[str, Any] = {"color": alt.value(color("c1"))}
        for channel, setting, encode, options in (
            ("color", self.color, alt.Color, {}),
            ("shape", self.shape, alt.Shape, {"range": SHAPES}),
        ):
            if setting:
                domain = list(dict.fromkeys(point[channel] for point in points))
                legend = alt.Legend(title=setting, direction="horizontal", columns=LEGEND_COLUMNS)
                scale = alt.Scale(domain=domain, **options)
                found[channel] = encode(f"{channel}:N", scale=scale, legend=legend)
        return found

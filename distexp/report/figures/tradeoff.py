"""Charts of memory and of energy against throughput, and the table of what offloading costs."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import altair as alt

from distexp.report.data.answer import describe_tradeoff, recommended, short_name, strategy_label
from distexp.report.data.metrics import ENERGY, MEMORIES, SPEED
from distexp.report.data.overview import Overview, memory_metric, pareto_fronts
from distexp.report.data.repeats import EQUAL, RunGroup, group_by_settings, ratio_text
from distexp.report.data.rows import MAX_LENGTH, SEED, format_change, format_setting, is_strategy_option
from distexp.report.figures.base import (
    MAX_COLORS,
    SINGLE_WIDTH,
    Figure,
    Panel,
    Rows,
    color,
    inline_data,
    strategy_colors,
)
from distexp.report.figures.labels import Frame, is_shown, place_labels
from distexp.report.traces import RunTrace
from distexp.tables.columns import TextTable

MAX_LABELS = 16
CROWD = 200  # points; more are drawn small and pale
HEIGHT = 340  # pixels
MARGIN = 0.06  # of the axes, relative to the largest values
FEW_POINTS = 8  # so few points have their names as labels
MFU = "mfu_pct"
SHAPES = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross"]
FRONT = "Pareto front"
FRONT_DASH = [5, 4]
LEGEND_COLUMNS = alt.ExprRef("width < 420 ? 2 : 4")
STRATEGY = "strategy"
AREAS = [30, 330]  # square pixels of marks with the lowest and the highest MFU
OFFLOADS = (False, True, "pinned")  # Values of `offload`. The first one that was run is the baseline.


@dataclass(frozen=True)
class Tradeoff:
    """The runs of a chart of a cost against throughput; the failed ones are crosses on the axis of the cost."""

    overview: Overview
    cost: str  # metric of which less is better
    title: str
    unit: str
    number_format: str
    failed: tuple[RunGroup, ...] = ()

    @cached_property
    def groups(self) -> list[RunGroup]:
        """Return the completed groups whose cost and speed were measured."""
        return [
            group for group in self.overview.groups
            if group.completed and group.metric(self.cost) and group.metric(SPEED)
        ]  # fmt: skip

    @cached_property
    def fronts(self) -> list[list[RunGroup]]:
        """Return the Pareto fronts that are lines: a front of one run is a point."""
        return [front for front in pareto_fronts(self.overview, self.cost) if len(front) > 1]

    @property
    def has_labels(self) -> bool:
        """Return whether the points are few enough for labels."""
        return len(self.groups) <= MAX_LABELS

    def build(self, name: str, title: str, cheaper: str, noun: str, *notes: str) -> Figure | None:
        """Build the figure; None if there are no points. ``cheaper`` is the adjective for a lower cost, a ``noun``."""
        chart = self._draw()
        caption = " ".join([*self._describe(cheaper), *notes])
        finding = describe_tradeoff(self.overview, self.cost, noun)
        return None if chart is None else Figure(name, title, (Panel("", chart),), caption, finding=finding)

    def _describe(self, cheaper: str) -> Iterator[str]:
        """Yield how to read the marks."""
        if self.fronts:
            yield f"Pareto front: no other run is both {cheaper} and faster."
            if any(speed.noise is not None for group in self.groups if (speed := group.metric(SPEED))):
                yield "Differences within the noise do not count."
        if self.has_labels:
            yield "The numbers are those of the runs in the table. If there is no room, some are left out."
        if any(recommended(self.overview)):
            yield "Ring: the run to take, the fastest one, or the smallest one of those that are equally fast."

    def _draw(self) -> alt.LayerChart | None:
        """Draw the chart; None if there are no points, or a single one."""
        channels = _Channels(self.overview, self.cost)
        taken = {id(group) for group in recommended(self.overview)}
        groups = sorted(self.groups, key=lambda group: id(group) not in taken)  # Its label is placed first.
        points = [{**channels.point(group), "labels": self._labels_of(group, taken, len(groups))} for group in groups]
        if not points or len(points) + len(self.failed) < 2:
            return None
        failed = [{**channels.point(group), "speed": 0.0} for group in self.failed]
        rows = points + failed
        # Axes start at 0: a part of an axis would make small differences look large.
        highest, fastest = (max(row[name] for row in rows) or 1.0 for name in ("cost", "speed"))
        frame = Frame((0.0, (1 + MARGIN) * highest), (0.0, (1 + MARGIN) * fastest), SINGLE_WIDTH, HEIGHT)
        scales = [alt.Scale(domain=list(ends), nice=False, zero=False) for ends in (frame.x, frame.y)]
        title = f"{self.title} ({self.unit})"
        x = alt.X("cost:Q", title=title, scale=scales[0], axis=alt.Axis(tickCount=8))
        y = alt.Y("speed:Q", title="samples/s", scale=scales[1], axis=alt.Axis(tickCount=6))
        front = [
            {**channels.point(group), "front": n, "line": FRONT}
            for n, groups in enumerate(self.fronts) for group in groups
        ]  # fmt: skip
        layers: list[Any] = [_front_line(front, x, y)] if front else []
        size, opacity = (25, 0.5) if len(points) > CROWD else (110, 0.9)
        marks = alt.Chart(inline_data(points)).mark_point(filled=True, size=size, opacity=opacity, strokeWidth=0)
        layers.append(marks.encode(tooltip=self._tooltip(), **channels.encodings(points), x=x, y=y))
        rings = [point for point, group in zip(points, groups, strict=True) if id(group) in taken]
        if rings:
            ring = alt.Chart(inline_data(rings)).mark_point(filled=False, size=430, strokeWidth=2, color=color("ink"))
            layers.append(ring.encode(x=x, y=y))
        if self.has_labels or rings:
            layers += _labels(points, failed, front, frame, x=x, y=y)
        return alt.layer(*layers, *self._crosses(failed, x, y)).properties(height=HEIGHT)

    def _labels_of(self, group: RunGroup, taken: Collection[int], count: int) -> list[str]:
        """Return the labels of a point, the longest first."""
        is_taken = id(group) in taken
        if not is_taken and count > FEW_POINTS:
            return [group.label] if self.has_labels else []
        name = short_name(self.overview, group)
        return [f"take {name}", f"take {group.label}", group.label] if is_taken else [name, group.label]

    def _crosses(self, failed: Rows, x: alt.X, y: alt.Y) -> list[Any]:
        if not failed:
            return []
        base = alt.Chart(inline_data(failed)).encode(x=x, y=y, tooltip=self._tooltip())
        cross = base.mark_point(shape="M-.5 -.5L.5 .5M.5 -.5L-.5 .5", size=160, strokeWidth=2.5, color=color("bad"))
        if len(failed) > MAX_LABELS:
            return [cross]
        return [cross, base.mark_text(dy=-14, color=color("bad"), fontWeight=600).encode(text=alt.value("OOM"))]

    def _tooltip(self) -> list[alt.Tooltip]:
        return [
            alt.Tooltip("run:N"), alt.Tooltip("settings:N"), alt.Tooltip("status:N"),
            alt.Tooltip("cost:Q", title=self.unit, format=self.number_format),
            alt.Tooltip("speed:Q", title="samples/s", format=",.1f"),
            *([alt.Tooltip("mfu:Q", title="MFU %", format=".1f")] if any(map(_mfu, self.groups)) else []),
        ]  # fmt: skip


def _mfu(group: RunGroup) -> float | None:
    """Return the model FLOPs utilization in percent."""
    value = group.metric(MFU)
    return None if value is None else value.mean


def _labels(points: Rows, failed: Rows, front: Rows, frame: Frame, **axes: Any) -> Iterator[alt.Chart]:
    """Yield the labels with their runs, a layer for each place next to a mark."""
    fronts = [list(steps) for _, steps in groupby(front, key=lambda point: point["front"])]
    for place, rows in place_labels(points, failed, fronts, frame).items():
        if rows:
            labels = alt.Chart(inline_data(rows)).mark_text(align=place.align, dx=place.dx, dy=place.dy)
            yield labels.encode(**axes, text="label:N", opacity=is_shown())


def _front_line(front: Rows, x: alt.X, y: alt.Y) -> alt.Chart:
    legend = alt.Legend(title=None, symbolType="stroke", symbolSize=250, symbolDash=FRONT_DASH)
    dash = alt.StrokeDash("line:N", scale=alt.Scale(domain=[FRONT], range=[FRONT_DASH]), legend=legend)
    line = alt.Chart(inline_data(front)).mark_line(interpolate="step-after", strokeWidth=1.5, color=color("muted"))
    return line.encode(x=x, y=y, detail="front:N", strokeDash=dash)


class _Channels:
    """Color, shape and size: the strategy, the first other setting with few enough values, and the MFU.

    If the strategies are equal, the color is a setting, too. Without another setting the shape repeats the color.
    """

    def __init__(self, overview: Overview, cost: str) -> None:
        self.colors = strategy_colors(overview)
        has_strategies = 2 <= len(self.colors) <= MAX_COLORS

        def find(most: int, taken: str | None = None) -> str | None:
            values = {
                name: {format_setting(group.setting(name)) for group in overview.groups} for name in overview.varied
                if not (has_strategies and (name == STRATEGY or is_strategy_option(name)))
            }  # fmt: skip
            return next((name for name, found in values.items() if name != taken and 2 <= len(found) <= most), None)

        self.overview, self.cost = overview, cost
        self.color = STRATEGY if has_strategies else find(MAX_COLORS)
        self.shape = find(len(SHAPES), self.color)

    def point(self, group: RunGroup) -> dict[str, Any]:
        """Return the data of a point."""
        cost, speed = group.metric(self.cost), group.metric(SPEED)
        return {
            "run": group.label,
            "settings": self.overview.format_settings(group) or group.label,
            "cost": cost and float(f"{cost.mean:.6g}"),
            "speed": speed and round(speed.mean, 3),
            "status": group.status,
            "color": self.color and self._value(group, self.color),
            "shape": self.shape and self._value(group, self.shape),
            "mfu": _mfu(group),
        }

    def _value(self, group: RunGroup, name: str) -> str:
        return strategy_label(group) if name == STRATEGY else format_setting(group.setting(name), MAX_LENGTH)

    def encodings(self, points: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the encodings of color and shape, with legends."""
        found: dict[str, Any] = {"color": alt.value(color("c1"))}
        repeats_color = self.color and not self.shape and len({point["color"] for point in points}) <= len(SHAPES)
        for channel, setting, encode, source in (
            ("color", self.color, alt.Color, "color"),
            ("shape", self.color if repeats_color else self.shape, alt.Shape, "color" if repeats_color else "shape"),
        ):
            if setting:
                domain = sorted({point[source] for point in points}) if setting == STRATEGY else list(
                    dict.fromkeys(point[source] for point in points)
                )  # fmt: skip
                shades = [color(self.colors[name]) for name in domain] if setting == STRATEGY else None
                ranges = {"shape": {"range": SHAPES}, "color": {"range": shades} if shades else {}}[channel]
                legend = alt.Legend(title=setting, direction="horizontal", columns=LEGEND_COLUMNS)
                found[channel] = encode(f"{source}:N", scale=alt.Scale(domain=domain, **ranges), legend=legend)
        if len(points) <= CROWD and all(point["mfu"] for point in points):
            largest = max(point["mfu"] for point in points)
            legend = alt.Legend(title="MFU %", direction="horizontal", tickCount=3, format="~r")
            found["size"] = alt.Size("mfu:Q", scale=alt.Scale(domain=[0, largest], range=AREAS), legend=legend)
        return found


def build_memory_throughput(overview: Overview, traces: Sequence[RunTrace]) -> Figure | None:
    """Build the figure; None if no memory was measured."""
    memory = memory_metric(overview)
    if memory is None:
        return None
    failed = [group for group in overview.groups if "oom" in group.status and not group.completed]
    out_of_memory = tuple(group for group in failed if group.metric(memory))
    tradeoff = Tradeoff(overview, memory, MEMORIES[memory], "MiB", ",.0f", out_of_memory)
    offload = build_offload_table(overview, memory)
    notes = ["Red crosses: runs out of memory, at their peak."] if out_of_memory else []
    too_large = [
        group.label for group in overview.groups if group.status == "invalid" and group.rows[0].record.predicted
    ]
    if too_large:
        notes.append(f"Not run, because the memory was predicted not to suffice: {', '.join(too_large)}.")
    figure = tradeoff.build("memory_throughput", "Memory against throughput", "smaller", "memory", *notes)
    return figure and replace(figure, tables=(offload,) if offload else ())


def build_energy_throughput(overview: Overview, traces: Sequence[RunTrace]) -> Figure | None:
    """Build the figure; None if no energy was measured."""
    tradeoff = Tradeoff(overview, ENERGY, "energy per sample", "J", ",.3~f")
    return tradeoff.build("energy_throughput", "Energy against throughput", "more economical", "energy")


def build_offload_table(overview: Overview, memory: str) -> TextTable | None:
    """Compare runs that differ only in ``offload``; None if there are none."""
    names = [name for name in overview.varied if name not in ("offload", SEED)]
    memories = dict.fromkeys((memory, "cpu_peak_mib"))
    alike = group_by_settings(overview.groups, names).values()
    ordered = [sorted(groups, key=lambda group: OFFLOADS.index(group.setting("offload"))) for groups in alike]
    rows = tuple(
        (
            *(format_setting(group.setting(name), MAX_LENGTH) for name in names),
            *(format_setting(one.setting("offload")) for one in (group, baseline)),
            _time(baseline, group),
            *(_memory(baseline, group, name) for name in memories),
        )
        for baseline, *others in ordered
        if others and others[-1].setting("offload") != baseline.setting("offload")
        for group in others
    )
    if not rows:
        return None
    header = (*names, "offload", "compared with", "time", *(MEMORIES[name] for name in memories))
    return TextTable("Effect of offloading", header, rows)


def _time(baseline: RunGroup, group: RunGroup) -> str:
    if not (group.completed and baseline.completed):
        return f"{baseline.status} without it" if group.completed else group.status
    before, after = baseline.metric(SPEED), group.metric(SPEED)
    if not (before and after and after.mean):
        return "-"
    return ratio_text(group, baseline, SPEED, f"{before.mean / after.mean:.2f}x")


def _memory(baseline: RunGroup, group: RunGroup, name: str) -> str:
    before, after = baseline.metric(name), group.metric(name)
    if not (baseline.completed and group.completed and before and after and before.mean):
        return "-"
    change = ratio_text(group, baseline, name, format_change(after.mean, before.mean))
    return f"{'~0%' if change == EQUAL else change} ({after.mean:,.0f} MiB)"

"""Memory against throughput, with what is best in both, and what ran out of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from distexp.report.charts.theme import CATEGORIES, colour, values
from distexp.report.data.metrics import MEMORIES, SPEED
from distexp.report.data.overview import Overview
from distexp.report.data.repeats import RunGroup
from distexp.report.data.settings import format_setting
from distexp.report.findings.summary import memory_figure, pareto_fronts

MOST_LABELLED = 16
CROWD = 200  # points from which on they are drawn small and pale
SHAPES = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross"]


def tradeoff(overview: Overview) -> alt.LayerChart | None:
    """A point a training; None where no memory was measured."""
    name = memory_figure(overview)
    if name is None:
        return None
    coloured, shaped = _channels(overview)
    points = [
        _point(overview, group, name, coloured, shaped) for group in overview.groups
        if group.completed and group.metric(name) and group.metric(SPEED)
    ]  # fmt: skip
    if not points:
        return None
    front = [
        {**_point(overview, group, name, coloured, shaped), "front": n}
        for n, (groups, _) in enumerate(pareto_fronts(overview, name)) for group in groups
    ]  # fmt: skip
    x = alt.X(
        "memory:Q",
        title=f"{MEMORIES[name]} (MiB)",
        scale=alt.Scale(zero=False, nice=True, padding=16),
        axis=alt.Axis(tickCount=8),
    )
    y = alt.Y("speed:Q", title="samples/s", scale=alt.Scale(zero=True))
    base = alt.Chart(values(points))
    crowd = len(points) > CROWD
    marks = base.mark_point(filled=True, size=25 if crowd else 90, opacity=0.5 if crowd else 0.9, strokeWidth=0).encode(
        x=x, y=y, tooltip=_tooltip(name), **_encodings(points, coloured, shaped)
    )
    line = (
        alt.Chart(values(front))
        .mark_line(interpolate="step-after", strokeDash=[5, 4], strokeWidth=1.5, color=colour("muted"))
        .encode(x=x, y=y, detail="front:N")
    )
    layers: list[Any] = [line, marks]
    if len(points) <= MOST_LABELLED:
        layers.append(base.mark_text(align="left", dx=9, dy=-6).encode(x=x, y=y, text="run:N"))
    layers += _out_of_memory(overview, name, x, y)
    return alt.layer(*layers).properties(height=340)


def _channels(overview: Overview) -> tuple[str | None, str | None]:
    """The settings that colours and shapes stand for: the first that have few enough values."""

    def kinds(name: str) -> int:
        return len({format_setting(group.setting(name)) for group in overview.groups})

    coloured = next((name for name in overview.varied if 2 <= kinds(name) <= CATEGORIES), None)
    rest = (name for name in overview.varied if name != coloured and 2 <= kinds(name) <= len(SHAPES))
    return coloured, next(rest, None)


def _point(overview: Overview, group: RunGroup, name: str, coloured: str | None, shaped: str | None) -> dict[str, Any]:
    memory, speed = group.metric(name), group.metric(SPEED)
    return {
        "run": group.label,
        "what": overview.format_settings(group) or group.label,
        "memory": memory and round(memory.mean, 1),
        "speed": speed and round(speed.mean, 3),
        "status": group.status,
        "colour": coloured and format_setting(group.setting(coloured), 24),
        "shape": shaped and format_setting(group.setting(shaped), 24),
    }


def _encodings(points: Sequence[dict[str, Any]], coloured: str | None, shaped: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {"color": alt.value(colour("c1"))}
    for channel, setting, scale in (
        ("color", coloured, {}),
        ("shape", shaped, {"range": SHAPES}),
    ):
        field = "colour" if channel == "color" else "shape"
        if setting:
            domain = list(dict.fromkeys(point[field] for point in points))
            encode = alt.Color if channel == "color" else alt.Shape
            legend = alt.Legend(title=setting, direction="horizontal", columns=4)
            found[channel] = encode(f"{field}:N", scale=alt.Scale(domain=domain, **scale), legend=legend)
    return found


def _tooltip(name: str) -> list[alt.Tooltip]:
    return [
        alt.Tooltip("run:N"), alt.Tooltip("what:N", title="settings"), alt.Tooltip("status:N"),
        alt.Tooltip("memory:Q", title="MiB", format=",.0f"), alt.Tooltip("speed:Q", title="samples/s", format=",.1f"),
    ]  # fmt: skip


def _out_of_memory(overview: Overview, name: str, x: alt.X, y: alt.Y) -> list[Any]:
    """A cross on the axis at the peak that was reached; a run without a peak has no place here."""
    failed = [
        {**_point(overview, group, name, None, None), "speed": 0.0} for group in overview.groups
        if "oom" in group.status and not group.completed and group.metric(name)
    ]  # fmt: skip
    if not failed:
        return []
    base = alt.Chart(values(failed)).encode(x=x, y=y, tooltip=_tooltip(name))
    cross = base.mark_point(shape="M-.5 -.5L.5 .5M.5 -.5L-.5 .5", size=160, strokeWidth=2.5, color=colour("bad"))
    if len(failed) > MOST_LABELLED:
        return [cross]
    return [cross, base.mark_text(dy=-14, color=colour("bad"), fontWeight=600).encode(text=alt.value("OOM"))]

"""Scaling curves with the ideal line, strong and weak, and efficiency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from distexp.report.charts.theme import CATEGORIES, colour, values
from distexp.report.data.scaling import ScalingPoint, ScalingSeries

KINDS = {"strong": "Strong scaling", "weak": "Weak scaling", "mixed": "Scaling of neither kind"}


def growth(series: Sequence[ScalingSeries], kind: str) -> list[tuple[str, alt.LayerChart]]:
    """The panels of one kind: how it grew, and how efficiently; empty where no series is of this kind."""
    shown = [each for each in series if each.kind == kind][:CATEGORIES]
    if not shown:
        return []
    rows = [row for each in shown for row in _rows(each)]
    workers = sorted({row["workers"] for row in rows})
    if len(workers) < 2:
        return []
    panels = []
    if kind == "strong":
        ideal = [{"workers": n, "ideal": n / workers[0]} for n in workers]
        panels.append((f"{KINDS[kind]}: speed-up", _panel(rows, "speedup", "speed-up", workers, ideal)))
    if kind == "weak":
        ideal = [{"workers": n, "ideal": 1.0} for n in workers]
        title = f"{KINDS[kind]}: time, against the fewest workers"
        panels.append((title, _panel(rows, "relative_time", "real time / time of the fewest", workers, ideal)))
    ideal = [{"workers": n, "ideal": 100.0} for n in workers]
    panels.append((f"{KINDS[kind]}: efficiency", _panel(rows, "efficiency", "efficiency (%)", workers, ideal)))
    return panels


def _rows(series: ScalingSeries) -> list[dict[str, Any]]:
    """Where one number of workers ran on few nodes and on more, each way is a line of its own."""
    split = any(True for _ in series.node_pairs())
    rows = [_row(series, point, place) for point in series.points for place in [_place(point, split=split)]]
    begin = [_row(series, series.baseline, "several nodes")] if split and series.baseline.nodes == 1 else []
    return [*begin, *rows]


def _place(point: ScalingPoint, *, split: bool) -> str:
    return "several nodes" if split and point.nodes > 1 else "one node" if split else "as run"


def _row(series: ScalingSeries, point: ScalingPoint, place: str) -> dict[str, Any]:
    return {
        "series": series.name or "all", "place": place, "run": point.group.label,
        "workers": point.workers, "nodes": point.nodes, "speed": round(point.speed, 2),
        "speedup": round(point.speedup, 4), "relative_time": round(point.relative_time, 4),
        "efficiency": round(100 * point.efficiency, 2),
    }  # fmt: skip


def _panel(rows: list[dict[str, Any]], field: str, title: str, workers: list[int], ideal: list[dict[str, Any]]) -> Any:
    x = alt.X("workers:Q", title="workers", scale=alt.Scale(type="log", base=2, domain=[workers[0], workers[-1]],
              nice=False, padding=14), axis=alt.Axis(values=workers, format="d", grid=False))  # fmt: skip
    # On two logarithmic axes the ideal speed-up is a straight line.
    scale = alt.Scale(type="log", base=2, nice=False, padding=14) if field == "speedup" else alt.Scale(zero=True)
    y = alt.Y(f"{field}:Q", title=title, scale=scale)
    names = list(dict.fromkeys(row["series"] for row in rows))
    places = list(dict.fromkeys(row["place"] for row in rows))
    dashes = [[1, 0], [3, 3]] if "several nodes" in places else [[1, 0]]
    line = alt.Legend(title=None, direction="horizontal", symbolType="stroke", symbolSize=250)
    encoding = {
        "x": x, "y": y,
        "color": alt.Color("series:N", scale=alt.Scale(domain=names),
                           legend=alt.Legend(title=None, columns=1) if len(names) > 1 else None),
        "strokeDash": alt.StrokeDash("place:N", scale=alt.Scale(domain=sorted(places), range=dashes),
                                     legend=line if len(places) > 1 else None),
        "tooltip": [
            "run:N", "series:N", "workers:Q", "nodes:Q", alt.Tooltip("speed:Q", title="samples/s", format=",.1f"),
            alt.Tooltip("speedup:Q", format=".2f"), alt.Tooltip("efficiency:Q", title="efficiency %", format=".1f"),
        ],
    }  # fmt: skip
    base = alt.Chart(values(rows)).encode(**encoding)
    target = alt.Chart(values(ideal))
    drawn = target.mark_line(strokeDash=[6, 4], strokeWidth=1.5, color=colour("muted")).encode(x=x, y=alt.Y("ideal:Q"))
    label = alt.Chart(values(ideal[-1:])).mark_text(align="right", dy=-8, fontStyle="italic").encode(
        x=x, y=alt.Y("ideal:Q"), text=alt.value("ideal"))  # fmt: skip
    return alt.layer(drawn, label, base.mark_line(), base.mark_point(filled=True, size=60)).properties(height=280)

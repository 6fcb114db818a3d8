"""Forecasts in the scaling figure: a dashed line with rings, and a band for the interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from distexp.report.data.forecasts import ForecastCurve
from distexp.report.figures.theme import inline_data

OPACITY = 0.18


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
    """Return the layers of the forecasts; none without forecasts.

    Args:
        rows: Data of all curves.
        x: Axis of the workers.
        y: Axis of the metric.
    """
    if not rows:
        return []
    metric = str(y.to_dict()["field"])
    title = y.to_dict()["title"]
    names = list(dict.fromkeys(row["series"] for row in rows))
    colors = alt.Color("series:N", legend=None) if len(names) < 2 else alt.Color("series:N")
    base = alt.Chart(inline_data(list(rows))).encode(x=x, tooltip=_tooltip(metric))
    low, high = alt.Y(f"{metric}_low:Q", title=title), alt.Y2(f"{metric}_high")
    value = base.encode(y=alt.Y(f"{metric}:Q", title=title), color=colors)
    return [
        base.mark_area(fillOpacity=OPACITY, opacity=1).encode(y=low, y2=high, color=colors),
        value.mark_line(strokeDash=[5, 4]),
        value.mark_point(filled=False, size=55),
    ]


def _tooltip(metric: str) -> list[Any]:
    ends = [alt.Tooltip(f"{metric}{end}:Q", format=".2f") for end in ("", "_low", "_high")]
    return [
        "run:N",
        "series:N",
        "workers:Q",
        "nodes:Q",
        alt.Tooltip("speed:Q", title="samples/s", format=",.1f"),
        *ends,
    ]

"""Colors and styles of all charts.

Charts name their colors as CSS variables. The page defines the variables for light and dark mode; files get the
light palette.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt

LIGHT = {
    "page": "#f6f7f9", "card": "#ffffff", "ink": "#1b2430", "muted": "#5b6675", "grid": "#e6e9ee", "line": "#d3d8e0",
    "accent": "#2f5fd0", "good": "#14804a", "bad": "#c62f2f", "warn": "#946200",
    "c1": "#3366cc", "c2": "#e0690c", "c3": "#0f9168", "c4": "#b4337f",
    "c5": "#7a5bd6", "c6": "#9b7406", "c7": "#0b8fae", "c8": "#d2452f",
    "phase-setup": "#8a96a8", "phase-warmup": "#e0a030", "phase-train": "#3f7be0", "phase-eval": "#35a877",
    "phase-profile": "#d0569a", "phase-save": "#b066c8", "phase-search": "#2b98a8",
}  # fmt: skip
DARK = {
    "page": "#12161c", "card": "#1a2029", "ink": "#e6eaf0", "muted": "#9aa6b6", "grid": "#2a323e", "line": "#38424f",
    "accent": "#86aeff", "good": "#5fd295", "bad": "#ff8680", "warn": "#e8bd5a",
    "c1": "#7ea6ff", "c2": "#ffa25c", "c3": "#4fd0a2", "c4": "#f084bf",
    "c5": "#b59cff", "c6": "#e0bf55", "c7": "#5ccfe8", "c8": "#ff8a76",
    "phase-setup": "#8d99ab", "phase-warmup": "#e8b04a", "phase-train": "#6a9cf5", "phase-eval": "#52c493",
    "phase-profile": "#ee82b8", "phase-save": "#c78adb", "phase-search": "#57c0cf",
}  # fmt: skip

PHASES = ("search", "setup", "warmup", "train", "profile", "eval", "save")
MAX_COLORS = 8  # of one legend
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif'


def color(name: str) -> str:
    """Return the CSS variable of a color of the palettes."""
    return f"var(--{name})"


def chart_config() -> dict[str, Any]:
    """Return the Vega-Lite configuration of all charts."""
    axis = {
        "labelColor": color("muted"), "titleColor": color("muted"), "gridColor": color("grid"),
        "domainColor": color("line"), "tickColor": color("line"), "titleFontWeight": 500, "titlePadding": 8,
        "labelFontSize": 11, "titleFontSize": 12, "labelOverlap": True, "labelSeparation": 8,
    }  # fmt: skip
    legend = {
        "labelColor": color("ink"), "titleColor": color("muted"), "titleFontWeight": 500, "orient": "bottom",
        "labelFontSize": 11, "titleFontSize": 11, "labelLimit": 320, "symbolStrokeWidth": 2, "columnPadding": 16,
        "symbolBaseFillColor": color("muted"), "symbolBaseStrokeColor": color("muted"), "direction": "vertical",
        "layout": {"bottom": {"direction": "vertical", "anchor": "start", "margin": 6}},
    }  # fmt: skip
    return {
        "background": "transparent", "font": FONT, "view": {"stroke": None}, "axis": axis, "legend": legend,
        "title": {"color": color("ink"), "fontSize": 12, "fontWeight": 600, "anchor": "start"},
        "text": {"color": color("muted"), "fontSize": 11},
        "range": {"category": [color(f"c{n + 1}") for n in range(MAX_COLORS)]},
        "line": {"strokeWidth": 2, "strokeJoin": "round"},
    }  # fmt: skip


def apply_palette(specification: dict[str, Any], palette: dict[str, str]) -> dict[str, Any]:
    """Replace CSS variables by colors, for formats without CSS."""
    text = re.sub(r"var\(--([a-z0-9-]+)\)", lambda match: palette[match[1]], json.dumps(specification))
    return json.loads(text)  # type: ignore[no-any-return]


def inline_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> alt.Data:
    """Put many rows into a chart as CSV. It is smaller than a list of objects, and altair does not copy it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return alt.Data(values=text.getvalue(), format=alt.CsvDataFormat(type="csv"))


def inline_data(rows: list[dict[str, Any]]) -> alt.Data:
    """Put rows into a chart without copying them to a data frame."""
    return alt.Data(values=rows)

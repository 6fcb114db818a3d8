"""A figure with its panels, its PNG and SVG files, and the colors of all charts.

Charts name their colors as CSS variables. The page defines them for light and dark mode; files get the light palette.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from distexp.report.data.overview import Overview
from distexp.report.traces import RunTrace
from distexp.tables.columns import TextTable

VEGALITE = "6.4"  # version that altair writes and vl_convert draws
SINGLE_WIDTH = 640  # pixels of the only panel in a file
PANEL_WIDTH = 460  # pixels of one of several panels in a file
PNG_SCALE = 2.0
PHASES = ("compiling", "search", "setup", "warmup", "train", "profile", "eval", "save")
LARGEST_DRAWN = 1e15  # also the loss of a diverged run, or a number in a record of another program
MAX_COLORS = 8  # of one legend
Rows = list[dict[str, Any]]
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif'


@dataclass(frozen=True)
class Panel:
    """One chart of a figure."""

    title: str  # may be empty
    chart: alt.LayerChart
    traces: tuple[Path, ...] = ()  # full traces of the profiler, which the page links


@dataclass(frozen=True)
class LegendEntry:
    """An entry of a legend that all panels of a figure share."""

    label: str
    color: str  # of the palette
    shape: str  # line, ring, area or bar


@dataclass(frozen=True)
class Figure:
    """A figure of the report: charts, how to read them, sentences about them, and tables."""

    name: str  # of its files
    title: str
    panels: tuple[Panel, ...]
    caption: str = ""  # how to read the marks
    sentences: tuple[str, ...] = ()
    tables: tuple[TextTable, ...] = ()
    legend: tuple[LegendEntry, ...] = ()  # replaces the panels' legends on the page
    subtitle: str = ""  # what is drawn, if the title alone would be wrong
    is_wide: bool = False  # panels are below each other, not in columns

    def panel_spec(self, index: int) -> dict[str, Any]:
        """Return the Vega-Lite specification of a panel for the page, as wide as its container."""
        chart = _drawable(self.panels[index].chart.properties(width="container").to_dict(validate=False))
        return {
            **(_without_legends(chart) if self.legend else chart),
            "config": chart_config(),
            "autosize": {"type": "fit-x", "contains": "padding"},
        }

    def file_spec(self) -> dict[str, Any]:
        """Return the Vega-Lite specification of all panels together for a file, in light colors."""
        width = PANEL_WIDTH if len(self.panels) > 1 and not self.is_wide else SINGLE_WIDTH
        charts = [_with_title(panel).properties(width=width) for panel in self.panels]
        joined = charts[0] if len(charts) == 1 else self._concat(charts)
        titled = joined.properties(title=alt.TitleParams(self.subtitle, fontSize=14)) if self.subtitle else joined
        spec = _drawable(titled.to_dict(validate=False))
        return apply_palette({**spec, "config": {**chart_config(), "background": LIGHT["card"], "padding": 16}}, LIGHT)

    def _concat(self, charts: Sequence[alt.LayerChart]) -> alt.ConcatChart:
        scales = "shared" if self.legend else "independent"
        columns = 1 if self.is_wide else 2
        return alt.concat(*charts, columns=columns).resolve_scale(color=scales, fill=scales, shape=scales)


def _drawable(content: Any) -> Any:
    """Return a specification without numbers that no axis can show: the renderer would run out of memory."""
    if isinstance(content, dict):
        return {key: _drawable(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_drawable(value) for value in content]
    return None if isinstance(content, float) and abs(content) > LARGEST_DRAWN else content


def _without_legends(spec: dict[str, Any]) -> dict[str, Any]:
    def without_legend(field: Any) -> Any:
        return {**field, "legend": None} if isinstance(field, dict) and "legend" in field else field

    layers = spec["layer"]
    encodings = [{name: without_legend(field) for name, field in layer["encoding"].items()} for layer in layers]
    return {**spec, "layer": [{**layer, "encoding": one} for layer, one in zip(layers, encodings, strict=True)]}


def _with_title(panel: Panel) -> alt.LayerChart:
    return panel.chart.properties(title=alt.TitleParams(panel.title)) if panel.title else panel.chart


def describe_selection(overview: Overview, traces: Sequence[RunTrace]) -> str:
    """State how many rows of the table a figure shows; empty if it shows all."""
    total = sum(1 for group in overview.groups if group.status != "invalid")
    if len(traces) >= total:
        return ""
    return f"Drawn: {len(traces)} of {total} rows of the table. To draw others: distexp report DIR --trace RUN..."


def render_files(figures: Sequence[Figure], directory: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield path and content of a PNG and an SVG file of each figure that has panels."""
    for figure in (figure for figure in figures if figure.panels):
        spec = figure.file_spec()
        png = vl_convert.vegalite_to_png(spec, vl_version=VEGALITE, scale=PNG_SCALE)
        yield directory / f"{figure.name}.png", png
        yield directory / f"{figure.name}.svg", vl_convert.vegalite_to_svg(spec, vl_version=VEGALITE).encode()


LIGHT = {
    "page": "#f6f7f9", "card": "#ffffff", "ink": "#1b2430", "muted": "#5b6675", "grid": "#e6e9ee", "line": "#d3d8e0",
    "accent": "#2f5fd0", "good": "#14804a", "bad": "#c62f2f", "warn": "#946200",
    "c1": "#3366cc", "c2": "#e0690c", "c3": "#0f9168", "c4": "#b4337f",
    "c5": "#7a5bd6", "c6": "#9b7406", "c7": "#0b8fae", "c8": "#d2452f",
    "phase-setup": "#8a96a8", "phase-warmup": "#e0a030", "phase-train": "#3f7be0", "phase-eval": "#35a877",
    "phase-profile": "#d0569a", "phase-save": "#b066c8", "phase-search": "#2b98a8", "phase-compiling": "#7a8f3c",
}  # fmt: skip
DARK = {
    "page": "#12161c", "card": "#1a2029", "ink": "#e6eaf0", "muted": "#9aa6b6", "grid": "#2a323e", "line": "#38424f",
    "accent": "#86aeff", "good": "#5fd295", "bad": "#ff8680", "warn": "#e8bd5a",
    "c1": "#7ea6ff", "c2": "#ffa25c", "c3": "#4fd0a2", "c4": "#f084bf",
    "c5": "#b59cff", "c6": "#e0bf55", "c7": "#5ccfe8", "c8": "#ff8a76",
    "phase-setup": "#8d99ab", "phase-warmup": "#e8b04a", "phase-train": "#6a9cf5", "phase-eval": "#52c493",
    "phase-profile": "#ee82b8", "phase-save": "#c78adb", "phase-search": "#57c0cf", "phase-compiling": "#a3b860",
}  # fmt: skip


def color(name: str) -> str:
    """Return the CSS variable of a color of the palettes."""
    return f"var(--{name})"


def color_by(channel: str, colors: Mapping[str, str]) -> alt.Color:
    """Return the color of a field, given the palette's color of each value, with a legend in four columns."""
    scale = alt.Scale(domain=list(colors), range=list(map(color, colors.values())))
    return alt.Color(channel, scale=scale, legend=alt.Legend(title=None, direction="horizontal", columns=4))


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


# Labels of stacked bars and of scatter charts.


FEW_BARS = 8  # so few bars have their settings as labels
# Characters of a line that fit into the room of the labels. With longer ones, the settings start a new line.
LONGEST_LINE = 28
LINE_HEIGHT = 14  # pixels of a line of a label
# Widths in pixels. From each on, up to the next, labels are where they fit at the smaller one.
CHART_WIDTHS = (220, 420, 800, 100_000)
LETTER, LINE = 6.6, 12.0  # pixels of a letter at the font size of labels
MARK = 6.0  # pixels from the center of a mark to its border, at most
Row = dict[str, Any]
Range = tuple[float, float]  # lowest and highest value of an axis


def label_axis(names: Sequence[str], text: str = "datum.label") -> alt.Axis:
    """Return the axis of the labels of bars; ``text`` is the Vega expression of a label."""
    broken = f"replace({text}, ' (', ', (')" if _breaks_settings(names) else text
    offset = -LINE_HEIGHT * (_most_lines(names) - 1) / 2
    return alt.Axis(
        labelExpr=f"split({broken}, ', ')", labelLimit=190, ticks=False, domain=False, grid=False, labelOffset=offset
    )


def bar_height(names: Sequence[str], least: int) -> int:
    """Return the height of a bar in pixels, so that all lines of its label are shown."""
    return max(least, LINE_HEIGHT * _most_lines(names) + 12)


def _most_lines(names: Sequence[str]) -> int:
    return max(name.count(", ") + 1 for name in names) + _breaks_settings(names)


def _breaks_settings(names: Sequence[str]) -> bool:
    """Return whether the settings start a line, because a first line with them is too long."""
    return any(" (" in name and len(name.split(", ")[0]) > LONGEST_LINE for name in names)


@dataclass(frozen=True)
class Frame:
    """The ranges of the fields ``cost`` and ``speed`` of a chart, and its size in pixels."""

    x: Range
    y: Range
    width: float
    height: float

    def pixels(self, row: Row) -> tuple[float, float]:
        """Return the position of a row, from the upper left corner."""
        (left, right), (bottom, top) = self.x, self.y
        across, up = (row["cost"] - left) / (right - left), (row["speed"] - bottom) / (top - bottom)
        return self.width * across, self.height * (1 - up)


@dataclass(frozen=True)
class Place:
    """A place next to a mark: alignment of the text, and its distance in pixels."""

    align: str
    dx: float
    dy: float

    def box(self, x: float, y: float, text: str) -> Box:
        """Return where a text would be, next to a mark."""
        left = x + self.dx - (LETTER * len(text) if self.align == "right" else 0.0)
        return Box(left, y + self.dy - LINE / 2, left + LETTER * len(text), y + self.dy + LINE / 2)


PLACES = (Place("left", 9, -6), Place("right", -9, -6), Place("left", 9, 8), Place("right", -9, 8))
"""Places in the order in which they are tried."""


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        """Return whether two rectangles have a common point."""
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def place_labels(
    points: Sequence[Row], marks: Sequence[Row], steps: Sequence[Sequence[Row]], frame: Frame
) -> dict[Place, list[Row]]:
    """Return the rows of the labels by their place. A label without room at a width has no row for it.

    The first points get a label first. Labels never hide other marks, and avoid lines with steps if they can.
    """
    placed: dict[Place, list[Row]] = {place: [] for place in PLACES}
    for low, high in pairwise(CHART_WIDTHS):
        shown = {"from": 0 if low == CHART_WIDTHS[0] else low, "to": high}
        at_width = replace(frame, width=low)
        lines = [box for line in steps for box in _step_boxes(at_width, line)]
        for point, place in _places_in(at_width, points, marks, lines):
            placed[place].append({**point, **shown})
    return placed


def is_shown() -> Any:
    """Return the opacity of a label: 1 if the chart has the width that its place was chosen for."""
    return alt.condition("width >= datum.from && width < datum.to", alt.value(1), alt.value(0))


def _places_in(
    frame: Frame, points: Sequence[Row], marks: Sequence[Row], lines: Sequence[Box]
) -> Iterator[tuple[Row, Place]]:
    centers = [frame.pixels(row) for row in (*points, *marks)]
    taken = [Box(x - MARK, y - MARK, x + MARK, y + MARK) for x, y in centers]
    for point, (x, y) in zip(points, centers, strict=False):
        boxes = {place: place.box(x, y, point["run"]) for place in PLACES}
        inside = {place: box for place, box in boxes.items() if box.left >= 0 and box.right <= frame.width}
        free = [place for place, box in inside.items() if not any(map(box.overlaps, taken))]
        if free:
            best = min(free, key=lambda place: any(map(boxes[place].overlaps, lines)))
            taken.append(boxes[best])
            yield point, best


def _step_boxes(frame: Frame, line: Sequence[Row]) -> Iterator[Box]:
    """Yield the horizontal and the vertical part of each step of a line that rises to the right."""
    for (left, bottom), (right, top) in pairwise(map(frame.pixels, line)):
        yield Box(left, bottom - 1, right, bottom + 1)
        yield Box(right - 1, top, right + 1, bottom)

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
from pathlib import Path
from textwrap import wrap
from typing import Any

import altair as alt
import vl_convert

from distexp.config.keys import options_of
from distexp.report.data.answer import strategy_label
from distexp.report.data.overview import Overview
from distexp.report.data.repeats import RunGroup
from distexp.report.files import LIGHT
from distexp.report.traces import RunTrace
from distexp.tables.columns import TextTable

VEGALITE = "6.4"  # version that altair writes and vl_convert draws
SINGLE_WIDTH = 640  # pixels of the only panel in a file
NARROW, COLUMN, WIDE = 330, 500, 860  # pixels of a chart on the page: on a phone, of several panels, alone
PANEL_WIDTH = 460  # pixels of one of several panels in a file
PNG_SCALE = 2.0
TITLE_LENGTH = 80  # letters of a line
PHASES = ("compiling", "search", "setup", "warmup", "train", "profile", "eval", "save")
LARGEST_DRAWN = 1e15  # also the loss of a diverged run, or a number in a record of another program
MAX_COLORS = 8  # of one legend
Rows = list[dict[str, Any]]
FONT = 'Arial, "Liberation Sans", Helvetica, sans-serif'  # of equal widths: here, and where the page is opened


@dataclass(frozen=True)
class Panel:
    """One chart of a figure."""

    title: str  # may be empty
    chart: alt.LayerChart
    traces: tuple[Path, ...] = ()  # full traces of the profiler, which the page links
    still: alt.LayerChart | None = None  # without a script, if the chart zooms with one


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
    title: str  # what is drawn
    panels: tuple[Panel, ...]
    caption: str = ""  # how to read the marks
    sentences: tuple[str, ...] = ()
    tables: tuple[TextTable, ...] = ()
    legend: tuple[LegendEntry, ...] = ()  # replaces the panels' legends on the page
    subtitle: str = ""  # what is drawn, if the title alone would be wrong
    is_wide: bool = False  # panels are below each other, not in columns
    finding: str = ""  # what the figure shows; empty if noise decides
    svg: str = ""  # its file, if it is drawn already
    png: bytes = b""  # the same as pixels

    @property
    def heading(self) -> str:
        """Return what the figure shows; if noise decides, what is drawn."""
        return self.finding or self.title

    def panel_spec(self, chart: alt.LayerChart) -> dict[str, Any]:
        """Return the Vega-Lite specification of a panel's chart for the page, as wide as its container."""
        spec = _drawable(chart.to_dict(validate=False))
        return {
            **(_without_legends(spec) if self.legend else spec),
            "width": "container",
            "config": chart_config(),
            "autosize": {"type": "fit-x", "contains": "padding"},
        }

    def draw_panel(self, index: int) -> Iterator[tuple[str, str]]:
        """Yield a panel as SVG that needs no script, for a ``narrow`` and for a ``wide`` place; one for ``all``."""
        full = COLUMN if len(self.panels) > 1 and not self.is_wide else WIDE
        panel = self.panels[index]
        spec = describe_marks(self.panel_spec(panel.still or panel.chart))
        for kind, width in ({"narrow": NARROW, "wide": full} if panel.still is None else {"all": full}).items():
            svg = vl_convert.vegalite_to_svg({**spec, "width": width}, vl_version=VEGALITE)
            yield kind, shorten_svg(svg, f"{self.name}-{index}-{kind}-")

    def drawn(self) -> Figure:
        """Return the figure with its files drawn. Raise ValueError if it cannot be drawn."""
        if not self.panels:
            return self
        svg = vl_convert.vegalite_to_svg(self.file_spec(), vl_version=VEGALITE)
        return replace(self, svg=svg, png=vl_convert.svg_to_png(svg, scale=PNG_SCALE))

    def file_spec(self) -> dict[str, Any]:
        """Return the Vega-Lite specification of all panels together for a file, in light colors."""
        width = PANEL_WIDTH if len(self.panels) > 1 and not self.is_wide else SINGLE_WIDTH
        charts = [_with_title(panel).properties(width=width) for panel in self.panels]
        joined = charts[0] if len(charts) == 1 else self._concat(charts)
        lines = wrap(self.finding or self.subtitle, TITLE_LENGTH)
        titled = joined.properties(title=alt.TitleParams(lines, fontSize=14)) if lines else joined
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


def render_files(figures: Sequence[Figure], directory: Path, *, with_pdf: bool = False) -> Iterator[tuple[Path, bytes]]:
    """Yield path and content of a PNG and an SVG file of each figure that has panels, and on request of a PDF file."""
    for figure in (figure if figure.svg else figure.drawn() for figure in figures if figure.panels):
        yield directory / f"{figure.name}.png", figure.png
        yield directory / f"{figure.name}.svg", figure.svg.encode()
        if with_pdf:
            yield directory / f"{figure.name}.pdf", vl_convert.svg_to_pdf(figure.svg)


# Charts without a script: the text of a mark is its tooltip, and a mark of a run links to its row of the table.


ROW_OF_RUN = "'#run-' + replace(replace(datum.run, /^run /, ''), / .*$/, '')"
"""Vega expression of the link to the row of ``run 3 (strategy=ddp)`` or ``3 +2``."""

UNUSED = re.compile(
    r' (?:aria-roledescription|font-family)="[^"]*"| role="graphics-[a-z]+"| aria-hidden="true"'
    r'|<path class="foreground"[^>]*/>|<path class="background"(?![^>]*(?:fill|stroke)=)[^>]*/>'
    r'|<text[^>]* opacity="0"[^>]*>[^<]*</text>'
)
DECIMALS = re.compile(r"(\.\d)\d+")
GEOMETRY = re.compile(r' (?:d|transform|x2|y2|width|height)="[^"]*"')
LABELED = re.compile(r'<(path|line|rect)([^>]*?) aria-label="([^"]*)"([^>]*?)/>')


def describe_marks(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a specification whose marks have the text of their tooltip, and a link to the row of their run."""
    return {**spec, "layer": list(map(_described, spec["layer"]))}


def _described(layer: dict[str, Any]) -> dict[str, Any]:
    encoding = dict(layer.get("encoding", {}))
    fields = encoding.pop("tooltip", [])
    if layer["mark"]["type"] in ("line", "area"):  # one mark has many values
        fields = [field for field in fields if field["type"] == "nominal"]
    if not fields:
        return {**layer, "encoding": encoding, "mark": {**layer["mark"], "aria": False}}
    encoding["description"] = {"value": {"expr": " + '\\n' + ".join(map(_field_text, fields))}}
    if any(field["field"] == "run" for field in fields):
        encoding["href"] = {"value": {"expr": ROW_OF_RUN}}
    return {**layer, "encoding": encoding}


def _field_text(field: dict[str, Any]) -> str:
    value = f"datum['{field['field']}']"
    text = f"format({value}, '{field['format']}')" if "format" in field else value
    return f"'{field.get('title', field['field'])}: ' + (isValid({value}) ? {text} : '-')"


def shorten_svg(svg: str, prefix: str) -> str:
    """Return an SVG for a page: without what a browser does not need, with unique ids, and titles of its marks."""
    svg = UNUSED.sub("", svg)
    svg = GEOMETRY.sub(lambda match: DECIMALS.sub(r"\1", match[0]), svg)
    svg = LABELED.sub(r"<\1\2\4><title>\3</title></\1>", svg)
    svg = re.sub(r'xlink:href="[^"#]*#', 'href="#', svg)  # vl_convert completes a link to one of its own site
    return re.sub(r'(id="|url\(#)(?=clip|gradient)', rf"\1{prefix}", svg)


def color(name: str) -> str:
    """Return the CSS variable of a color of the palettes."""
    return f"var(--{name})"


def strategy_colors(overview: Overview) -> dict[str, str]:
    """Return the color of each strategy with its main option; the first one of a strategy is equal in all reports."""
    order = options_of("strategy")
    found = {strategy_label(group): str(group.setting("strategy")).split()[0] for group in overview.groups}
    free = [f"c{n + 1}" for n in range(MAX_COLORS)]
    own = {name: free[n] for n, name in enumerate(order[:MAX_COLORS])}
    colors: dict[str, str] = {}
    for label, name in sorted(found.items()):
        shade = own.pop(name, None) or next((one for one in reversed(free) if one not in own.values()), "muted")
        colors[label] = shade
        if shade in free:
            free.remove(shade)
    return colors


def group_colors(overview: Overview, groups: Sequence[RunGroup]) -> list[str]:
    """Return the colors of the lines of some trainings: those of their strategies, if all differ in it."""
    labels = [strategy_label(group) for group in groups]
    if len(set(labels)) == len(labels):
        return [color(strategy_colors(overview)[label]) for label in labels]
    return [color(f"c{n % MAX_COLORS + 1}") for n in range(len(groups))]


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

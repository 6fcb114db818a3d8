"""A figure with its panels, and the PNG and SVG files of figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from distexp.report.data.overview import Overview
from distexp.report.figures.theme import LIGHT, apply_palette, chart_config
from distexp.report.traces import RunTrace
from distexp.tables.text_table import TextTable

VEGALITE = "6.4"  # version that altair writes and vl_convert draws
SINGLE_WIDTH = 640  # pixels of the only panel in a file
PANEL_WIDTH = 460  # pixels of one of several panels in a file
PNG_SCALE = 2.0


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
        chart = self.panels[index].chart.properties(width="container").to_dict(validate=False)
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
        spec = titled.to_dict(validate=False)
        return apply_palette({**spec, "config": {**chart_config(), "background": LIGHT["card"], "padding": 16}}, LIGHT)

    def _concat(self, charts: Sequence[alt.LayerChart]) -> alt.ConcatChart:
        scales = "shared" if self.legend else "independent"
        columns = 1 if self.is_wide else 2
        return alt.concat(*charts, columns=columns).resolve_scale(color=scales, fill=scales, shape=scales)


def _without_legends(spec: dict[str, Any]) -> dict[str, Any]:
    layers = [
        {**layer, "encoding": {channel: _without_legend(field) for channel, field in layer["encoding"].items()}}
        for layer in spec["layer"]
    ]
    return {**spec, "layer": layers}


def _without_legend(field: Any) -> Any:
    return {**field, "legend": None} if isinstance(field, dict) and "legend" in field else field


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

"""All figures of a report, each with its panels, its findings and its tables; and the pictures of them on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from distexp.report.charts.curves import losses, step_times
from distexp.report.charts.growth import growth
from distexp.report.charts.theme import LIGHT, config, painted
from distexp.report.charts.timeline import timelines
from distexp.report.charts.tradeoff import tradeoff
from distexp.report.data.overview import Overview
from distexp.report.data.text_table import TextTable
from distexp.report.findings.base import Finding
from distexp.report.findings.growth import growth_findings, growth_table, pairs_table
from distexp.report.findings.traces import loss_findings, memory_findings, step_findings
from distexp.report.findings.tradeoff import tradeoff_findings
from distexp.report.traces import RunTrace

VEGALITE = "6.4"  # what altair writes and vl_convert draws
PICTURE_WIDTH = 460  # pixels of a panel
PICTURE_SCALE = 2.0  # of the PNG


@dataclass(frozen=True)
class Plot:
    """A figure."""

    name: str  # of its files
    title: str
    panels: tuple[tuple[str, alt.LayerChart], ...]  # with their titles, which may be empty
    findings: tuple[Finding, ...]
    tables: tuple[TextTable, ...] = ()
    phases: bool = field(default=False)  # whether the phases of a run are shaded in it

    def answers(self) -> list[tuple[str | None, list[str]]]:
        """The sentences in their order, those that answer one question together."""
        together = groupby(self.findings, key=lambda finding: finding.question)
        return [(question, [finding.text for finding in found]) for question, found in together]

    def specification(self, panel: int) -> dict[str, Any]:
        """A panel as the page draws it: as wide as there is room, colours by name."""
        chart = self.panels[panel][1].properties(width="container")
        return {
            **chart.to_dict(validate=False),
            "config": config(),
            "autosize": {"type": "fit-x", "contains": "padding"},
        }

    def picture(self) -> dict[str, Any]:
        """All panels in one, for a file."""
        charts = [
            chart.properties(width=PICTURE_WIDTH, title=alt.TitleParams(title)) if title
            else chart.properties(width=PICTURE_WIDTH) for title, chart in self.panels
        ]  # fmt: skip
        whole = charts[0] if len(charts) == 1 else alt.concat(*charts, columns=2).resolve_scale(color="independent")
        drawn = {**whole.to_dict(validate=False), "config": {**config(), "background": LIGHT["card"], "padding": 16}}
        if self.phases:  # the page says beside the panels what the shades mean
            for panel in drawn.get("concat", [drawn]):
                panel["layer"][0]["encoding"]["fill"]["legend"] = {"title": None, "direction": "horizontal"}
        return painted(drawn, LIGHT)


def plots(overview: Overview, traces: Sequence[RunTrace]) -> Iterator[Plot]:
    """The figures that these runs allow."""
    chart = tradeoff(overview)
    if chart is not None:
        yield Plot("memory_throughput", "Memory against throughput", (("", chart),), tuple(tradeoff_findings(overview)))
    grown = tuple(panel for kind in ("strong", "weak", "mixed") for panel in growth(overview.series, kind))
    if overview.series:  # one number of workers on few nodes and on more has a table, but no curve
        tables = tuple(table for table in (growth_table(overview), pairs_table(overview)) if table)
        yield Plot("scaling", "Scaling", grown, tuple(growth_findings(overview)), tables)
    left_out = tuple(_left_out(overview, traces))  # said once
    for kind, said in (("gpu", "GPU"), ("cpu", "CPU")):
        panels = tuple(timelines(traces, kind))
        if panels:
            title = f"{said} memory over time"
            yield Plot(f"{kind}_memory", title, panels, (*memory_findings(traces, kind), *left_out), phases=True)
            left_out = ()
    for name, title, drawn, found in (
        ("losses", "Losses", losses(traces), loss_findings),
        ("step_times", "Step times", step_times(traces), step_findings),
    ):
        if drawn is not None:
            yield Plot(name, title, (("", drawn),), (*found(traces), *left_out))
            left_out = ()


def _left_out(overview: Overview, traces: Sequence[RunTrace]) -> Iterator[Finding]:
    total = sum(1 for group in overview.groups if group.status != "invalid")
    if len(traces) < total:
        yield Finding(
            f"{len(traces)} of {total} trainings are drawn, the fastest, the smallest and those out of memory first; "
            "report --trace RUN... draws others."
        )


def pictures(figures: Sequence[Plot], directory: Path) -> Iterator[tuple[Path, bytes]]:
    """A PNG and an SVG of each figure: where it goes, and its content."""
    for figure in (each for each in figures if each.panels):
        drawn = figure.picture()
        png = vl_convert.vegalite_to_png(drawn, vl_version=VEGALITE, scale=PICTURE_SCALE)
        yield directory / f"{figure.name}.png", png
        yield directory / f"{figure.name}.svg", vl_convert.vegalite_to_svg(drawn, vl_version=VEGALITE).encode()

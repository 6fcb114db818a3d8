"""Builds the page from its template, style and script, the data, and two JavaScript libraries."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from distexp.report.data.overview import Overview
from distexp.report.exercises import exercise_tables
from distexp.report.figures.base import Figure
from distexp.report.figures.theme import DARK, LIGHT
from distexp.report.page.configurations import configurations
from distexp.report.page.embedding import (
    bundle_chart_library,
    compress,
    escape_closing_tags,
    read_table_library,
    to_json,
)
from distexp.report.page.provenance import provenance_tables
from distexp.report.page.run_table import relative_link, run_table
from distexp.report.page.tiles import build_tiles
from distexp.report.summary import explain_cpu_speeds, summarize
from distexp.runs.listing import join_first

MAX_NOTES = 20
PAGE_FILES = files("distexp.report.page")


def write_page(overview: Overview, figures: Sequence[Figure], path: Path, skipped: Sequence[str] = ()) -> None:
    """Write the page. Its links are relative to its folder."""
    notes = [*skipped, *overview.notes()]
    remarks = list(explain_cpu_speeds(overview))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((PAGE_FILES / "page.html").read_text())
    text = template.render(
        title=join_first(dict.fromkeys(row.record.run.name for row in overview.rows), 3),
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        tiles=list(build_tiles(overview)),
        remarks=remarks,
        summary=[sentence for sentence in summarize(overview) if sentence not in remarks],
        notes=notes[:MAX_NOTES],
        more_notes=max(0, len(notes) - MAX_NOTES),
        exercises=list(exercise_tables(overview)),
        figures=figures,
        can_compare=len(overview.rows) > 1,
        link=lambda target: relative_link(target, path.parent),
        provenance=list(provenance_tables(overview.rows)),
        palettes={"light": LIGHT, "dark": DARK},
        style=Markup((PAGE_FILES / "page.css").read_text()),
        table_style=escape_closing_tags(read_table_library(".css")),
        table_library=compress(read_table_library(".js")),
        chart_library=compress(bundle_chart_library()),
        script=escape_closing_tags((PAGE_FILES / "page.js").read_text()),
        data=compress(to_json(_page_data(overview, figures, path.parent))),
    )
    path.write_text(text)


def _page_data(overview: Overview, figures: Sequence[Figure], directory: Path) -> dict[str, Any]:
    """Return the data for the page's script."""
    return {
        "runs": run_table(overview, directory),
        "configurations": configurations(overview),
        "charts": {f"{figure.name}-{n}": figure.panel_spec(n) for figure in figures for n in range(len(figure.panels))},
    }

"""Puts the page together: template, style, script, the libraries' own scripts, and the data."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import vl_convert
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from distexp.report.charts.theme import DARK, LIGHT, PHASES
from distexp.report.data.metrics import MEMORIES, METRICS_BY_NAME, SPEED
from distexp.report.data.overview import Overview
from distexp.report.exercises import exercise_tables
from distexp.report.findings.summary import memory_figure, sentences
from distexp.report.page.provenance import provenance
from distexp.report.page.runs import configurations, run_table
from distexp.report.plots import VEGALITE, Plot
from distexp.runs.record import FAILURES, finite

MOST_NOTES = 20
HERE = files("distexp.report.page")


def write_page(overview: Overview, figures: Sequence[Plot], path: Path, skipped: Sequence[str] = ()) -> None:
    """Writes the page; its links are relative to its own folder."""
    notes = [*skipped, *overview.notes()]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((HERE / "page.html").read_text())
    text = template.render(
        title=_title(overview),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        tiles=_tiles(overview),
        sentences=list(sentences(overview)),
        notes=notes[:MOST_NOTES],
        more_notes=max(0, len(notes) - MOST_NOTES),
        exercises=list(exercise_tables(overview)),
        figures=figures,
        provenance=list(provenance(overview.rows)),
        phases=PHASES,
        palettes={"light": LIGHT, "dark": DARK},
        style=Markup((HERE / "page.css").read_text()),
        table_style=_code(_table_library(".css")),
        table_library=_packed(_table_library(".js")),
        chart_library=_packed(_chart_library()),
        script=_code((HERE / "page.js").read_text()),
        data=_packed(_json(_data(overview, figures, path.parent))),
    )
    path.write_text(text)


def _data(overview: Overview, figures: Sequence[Plot], directory: Path) -> dict[str, Any]:
    """What the script of the page reads."""
    return {
        "runs": run_table(overview, directory),
        "configurations": configurations(overview),
        "charts": {
            f"{figure.name}-{n}": figure.specification(n) for figure in figures for n in range(len(figure.panels))
        },
    }


@cache
def _chart_library() -> str:
    """A module of Vega, Vega-Lite and Vega-Embed, as vl_convert bundles them; it takes a second to make."""
    return vl_convert.javascript_bundle("export default vegaEmbed;", vl_version=VEGALITE)


def _table_library(kind: str) -> str:
    """DataTables, as the package itables bundles it: a module, and its style.

    The package is not imported, for it would read the pyproject.toml of whatever folder one is in.
    """
    package = find_spec("itables")
    assert package is not None
    assert package.origin is not None
    return (Path(package.origin).parent / "html" / f"dt_bundle{kind}").read_text()


def _packed(text: str) -> str:
    """A library's module, or the data, for the page's script to unpack: it makes the page a quarter as large."""
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _code(text: str) -> Markup:
    """Code inside a script or style element, which ends at the first closing tag of either."""
    return Markup(text.replace("</script", "<\\/script").replace("</style", "<\\/style"))


def _json(content: Any) -> str:
    return json.dumps(finite(content), separators=(",", ":"), allow_nan=False)


def _title(overview: Overview) -> str:
    names = list(dict.fromkeys(row.record.run.name for row in overview.rows))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _tiles(overview: Overview) -> list[dict[str, str]]:
    """The few numbers at the top."""
    rows = overview.rows
    statuses = Counter(row.record.status for row in rows)
    others = ", ".join(f"{count} {status}" for status, count in statuses.items() if status != "completed")
    mood = "bad" if FAILURES & set(statuses) else ""
    done = f"{statuses['completed']:,} of {len(rows):,}"
    tiles = [{"what": "completed", "value": done, "detail": others or "every run", "mood": mood}]
    for what, name, largest in (("fastest", SPEED, True), ("smallest", memory_figure(overview) or "", False)):
        known = [
            (figure.mean, group) for group in overview.groups
            if name and group.completed and (figure := group.metric(name))
        ]  # fmt: skip
        if len(known) > 1 and len({group.task for _, group in known}) == 1:
            value, best = (max if largest else min)(known, key=lambda pair: pair[0])
            unit = "samples/s" if largest else "MiB"
            number = METRICS_BY_NAME[name].format_value(value)
            label = what if largest else f"{what} {MEMORIES[name]}"
            detail = overview.format_settings(best) or f"run {best.label}"
            tiles.append({"what": label, "value": f"{number} {unit}", "detail": detail, "mood": ""})
    grown = [series for series in overview.series if series.points[-1].workers > series.baseline.workers]
    if grown:
        best_series = max(grown, key=lambda series: series.points[-1].efficiency)
        last = best_series.points[-1]
        detail = f"{last.workers} workers" + (f", {best_series.name}" if best_series.name else "")
        tiles.append(
            {"what": "efficiency at the most workers", "value": f"{last.efficiency:.0%}", "detail": detail, "mood": ""}
        )
    return tiles

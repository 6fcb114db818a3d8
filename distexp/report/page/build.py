"""Builds the page from its template, style and script, the data, and two JavaScript libraries."""

from __future__ import annotations

import gzip
import json
import math
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import vl_convert
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from distexp.report.data.energy_totals import energy_totals
from distexp.report.data.metrics import MEMORIES, METRICS_BY_NAME, SPEED
from distexp.report.data.overview import Overview
from distexp.report.data.ranking import equal_to_best, memory_metric, rank_by_metric
from distexp.report.data.repeats import difference_noise
from distexp.report.data.scaling import ScalingSeries
from distexp.report.data.scaling_remarks import explain_doubt
from distexp.report.data.text import format_noise, name_runs
from distexp.report.exercises import exercise_tables
from distexp.report.figures.base import VEGALITE, Figure
from distexp.report.figures.theme import DARK, LIGHT
from distexp.report.page.provenance import provenance_tables
from distexp.report.page.runs import configurations, relative_link, run_table
from distexp.report.summary import explain_cpu_speeds, summarize
from distexp.runs.files import nan_to_none
from distexp.runs.record import FAILURES
from distexp.runs.text import join_first

MAX_NOTES = 20
PAGE_FILES = files("distexp.report.page")


@dataclass(frozen=True)
class Tile:
    """A number at the top of the page."""

    name: str
    value: str
    detail: str
    style: str = ""  # bad: in red


def write_page(overview: Overview, figures: Sequence[Figure], path: Path, skipped: Sequence[str] = ()) -> None:
    """Write the page. Its links are relative to its folder."""
    notes = [*skipped, *overview.notes()]
    remarks = list(explain_cpu_speeds(overview))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((PAGE_FILES / "page.html").read_text())
    text = template.render(
        title=join_first(dict.fromkeys(row.record.run.name for row in overview.rows), 3),
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        tiles=list(_tiles(overview)),
        remarks=remarks,
        summary=[sentence for sentence in summarize(overview) if sentence not in remarks],
        notes=notes[:MAX_NOTES],
        more_notes=max(0, len(notes) - MAX_NOTES),
        exercises=list(exercise_tables(overview)),
        figures=figures,
        link=lambda target: relative_link(target, path.parent),
        provenance=list(provenance_tables(overview.rows)),
        palettes={"light": LIGHT, "dark": DARK},
        style=Markup((PAGE_FILES / "page.css").read_text()),
        table_style=_escape_closing_tags(_read_table_library(".css")),
        table_library=_compress(_read_table_library(".js")),
        chart_library=_compress(_bundle_chart_library()),
        script=_escape_closing_tags((PAGE_FILES / "page.js").read_text()),
        data=_compress(_to_json(_page_data(overview, figures, path.parent))),
    )
    path.write_text(text)


def _page_data(overview: Overview, figures: Sequence[Figure], directory: Path) -> dict[str, Any]:
    """Return the data for the page's script."""
    return {
        "runs": run_table(overview, directory),
        "configurations": configurations(overview),
        "charts": {f"{figure.name}-{n}": figure.panel_spec(n) for figure in figures for n in range(len(figure.panels))},
    }


@cache
def _bundle_chart_library() -> str:
    """Return a JavaScript module with Vega, Vega-Lite and Vega-Embed. Cached, because it takes a second."""
    return vl_convert.javascript_bundle("export default vegaEmbed;", vl_version=VEGALITE)


def _read_table_library(suffix: str) -> str:
    """Return the JavaScript module or the style of DataTables from the package itables.

    The package is not imported, because it would read the pyproject.toml of the current folder.
    """
    package = find_spec("itables")
    assert package is not None
    assert package.origin is not None
    return (Path(package.origin).parent / "html" / f"dt_bundle{suffix}").read_text()


def _compress(text: str) -> str:
    """Compress a text, which the page's script decompresses. It makes the page four times smaller."""
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _escape_closing_tags(code: str) -> Markup:
    """Escape the tags that would end a script or style element early."""
    return Markup(code.replace("</script", "<\\/script").replace("</style", "<\\/style"))


def _to_json(content: Any) -> str:
    return json.dumps(nan_to_none(content), separators=(",", ":"), allow_nan=False)


def _tiles(overview: Overview) -> Iterator[Tile]:
    yield _completed_tile(overview)
    yield from _best_tile(overview, SPEED, "fastest", "samples/s", largest=True)
    memory = memory_metric(overview)
    if memory:
        yield from _best_tile(overview, memory, f"lowest {MEMORIES[memory]}", "MiB", largest=False)
    yield from _energy_tiles(overview)
    yield from _efficiency_tiles([series for series in overview.series if series.has_several_sizes])


def _energy_tiles(overview: Overview) -> Iterator[Tile]:
    """Yield the energy and cost of all runs together, if they were measured."""
    totals = list(energy_totals(overview.rows))
    if totals:
        yield Tile("total energy and cost", totals[0], ", ".join(totals[1:]))


def _efficiency_tiles(scaled: Sequence[ScalingSeries]) -> Iterator[Tile]:
    """Yield the best efficiency, and a warning if a baseline is not to be trusted."""
    trusted = [series for series in scaled if series.is_trusted]
    if trusted:
        best = max(trusted, key=lambda series: series.points[-1].efficiency)
        value = f"{best.points[-1].efficiency:.0%}"
        yield Tile("efficiency at the most workers", value, _describe_efficiency(best, trusted))
    for series in [series for series in scaled if not series.is_trusted][:1]:
        highest = max(point.efficiency for point in series.points)
        detail = f"{highest:.0%} relative to run {series.baseline.group.label}. {explain_doubt(series)}"
        yield Tile("efficiency", "do not trust the baseline", detail, "bad")


def _describe_efficiency(best: ScalingSeries, others: Sequence[ScalingSeries]) -> str:
    """Return the workers of a series with the noise of its efficiency, and the series that are equal within it."""
    last = best.points[-1]
    parts = [f"{last.workers} workers", best.name]
    if best.noise is not None:
        parts.append(f"noise {format_noise(best.noise, 1)}")
        equal = [each for each in others if each is not best and _is_equal_efficiency(best, each)]
        parts.append(f"{len(equal)} more equal within the noise" if equal else "")
    return ", ".join(filter(None, parts))


def _is_equal_efficiency(best: ScalingSeries, other: ScalingSeries) -> bool:
    if best.noise is None or other.noise is None:
        return False
    one, two = best.points[-1].efficiency, other.points[-1].efficiency
    return abs(one - two) <= math.hypot(one * best.noise, two * other.noise)


def _completed_tile(overview: Overview) -> Tile:
    statuses = Counter(row.record.status for row in overview.rows)
    others = ", ".join(f"{count} {status}" for status, count in statuses.items() if status != "completed")
    value = f"{statuses['completed']:,} of {len(overview.rows):,}"
    return Tile("completed runs", value, others or "no failures", "bad" if FAILURES & set(statuses) else "")


def _best_tile(overview: Overview, metric: str, name: str, unit: str, *, largest: bool) -> Iterator[Tile]:
    """Yield the best run; nothing if there is one run only, or several tasks, which are not comparable."""
    tasks = list(rank_by_metric(overview, metric, largest=largest))
    if len(tasks) != 1 or len(tasks[0][1]) < 2:
        return
    ranked = tasks[0][1]
    best, value = ranked[0]
    detail = overview.describe(best)
    if equal := equal_to_best(ranked):
        noise = max(difference_noise(value, other) or 0.0 for _, other in equal)
        labels = name_runs([best.label, *(group.label for group, _ in equal)])
        yield Tile(name, "not decided", f"{labels}: equal within the noise of {format_noise(noise, value.mean)}")
        return
    yield Tile(name, f"{METRICS_BY_NAME[metric].format_value(value.mean)} {unit}", detail)

"""Builds the page from its template, style, script, data and two libraries; and writes ``results.md``."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import vl_convert
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from distexp.config.overrides import join_first
from distexp.report.data.overview import Overview, failure_notes
from distexp.report.exercises import exercise_tables
from distexp.report.figures.base import DARK, LIGHT, VEGALITE, Figure
from distexp.report.overview_table import explain_cpu_speeds, overview_columns, summarize
from distexp.report.page.page_data import build_tiles, configurations, provenance_tables, relative_link, run_table
from distexp.system.files import nan_to_none

MAX_NOTES = 20
PAGE_FILES = files("distexp.report.page")


def write_page(overview: Overview, figures: Sequence[Figure], path: Path, skipped: Sequence[str] = ()) -> None:
    """Write the page. Its links are relative to its folder."""
    notes = [*skipped, *failure_notes(overview.rows)]
    remarks = list(explain_cpu_speeds(overview))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    charts = [(figure, n) for figure in figures for n in range(len(figure.panels))]
    data = {
        "runs": run_table(overview, path.parent),
        "configurations": configurations(overview),
        "charts": {f"{figure.name}-{n}": figure.panel_spec(n) for figure, n in charts},
    }
    text = environment.from_string((PAGE_FILES / "page.html").read_text()).render(
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
        data=compress(json.dumps(nan_to_none(data), separators=(",", ":"), allow_nan=False)),
    )
    path.write_text(text)


@cache
def bundle_chart_library() -> str:
    """Return a JavaScript module with Vega, Vega-Lite and Vega-Embed. Cached, because it takes a second."""
    return vl_convert.javascript_bundle("export default vegaEmbed;", vl_version=VEGALITE)


def read_table_library(suffix: str) -> str:
    """Return the JavaScript module or the style of DataTables from the package itables.

    The package is not imported, because it would read the pyproject.toml of the current folder.
    """
    package = find_spec("itables")
    assert package is not None
    assert package.origin is not None
    return (Path(package.origin).parent / "html" / f"dt_bundle{suffix}").read_text()


def compress(text: str) -> str:
    """Compress a text, which the page's script decompresses. It makes the page four times smaller."""
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def escape_closing_tags(code: str) -> Markup:
    """Escape the tags that would end a script or style element early."""
    return Markup(code.replace("</script", "<\\/script").replace("</style", "<\\/style"))


def write_markdown(overview: Overview, figures: Sequence[Figure], path: Path) -> None:
    """Write the report as Markdown; the images are expected in the folder ``plots``."""
    lines = [*_overview_lines(overview)]
    for table in exercise_tables(overview):
        lines += ["", f"## {table.title}", "", *_table(table.header, table.rows)]
        lines += [*(_escape(reason) + "  " for reason in table.reasons), _escape(table.note)]
    for figure in figures:
        lines += _figure_lines(figure)
    path.write_text("\n".join(lines) + "\n")


def _overview_lines(overview: Overview) -> Iterator[str]:
    columns = list(overview_columns(overview))
    rows = zip(*(column.cells for column in columns), strict=True)
    yield from _table([column.one_line_title for column in columns], rows, [column.right for column in columns])
    yield from (f"- {_escape(note)}" for note in failure_notes(overview.rows))
    yield ""
    yield from (_escape(sentence) + "  " for sentence in summarize(overview))


def _figure_lines(figure: Figure) -> Iterator[str]:
    yield from ("", f"## {figure.title}", "")
    if figure.subtitle:
        yield from (f"**{_escape(figure.subtitle)}**", "")
    if figure.panels:
        yield from (f"![{figure.title}](plots/{figure.name}.svg)", "")
    yield from (_escape(figure.caption), "")
    for table in figure.tables:
        yield from (f"{table.title}:", "", *_table(table.header, table.rows))
    yield from (f"- {_escape(sentence)}" for sentence in figure.sentences)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[bool] = ()) -> list[str]:
    """Return the lines of a table; ``right`` has whether a column is right-aligned."""
    ruler = ["---:" if n < len(right) and right[n] else "---" for n in range(len(header))]
    return [_line(header), _line(ruler), *map(_line, rows), ""]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_escape(cell) for cell in cells)} |"


def _escape(text: str) -> str:
    return " ".join(text.splitlines()).replace("|", "\\|").replace("<", "&lt;")

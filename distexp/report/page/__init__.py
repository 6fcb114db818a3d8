"""``report.html``: one self-contained file that works offline."""

import gzip
import json
import os
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

import vl_convert
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from distexp.config.overrides import join_first
from distexp.report.data.answer import build_tiles, headline, repeat_command, typed_command
from distexp.report.data.metrics import EFFICIENCY, SPEED, SPEEDUP, Metric
from distexp.report.data.overview import (
    DISTURBED_MARK,
    NOISE_MARK,
    Overview,
    failure_notes,
    failure_reason,
)
from distexp.report.data.reasons import reasons
from distexp.report.data.repeats import EQUAL
from distexp.report.data.rows import Row, format_setting
from distexp.report.exercises import exercise_tables
from distexp.report.figures import count_leading
from distexp.report.figures.base import VEGALITE, Figure
from distexp.report.files import DARK, LIGHT, result_row
from distexp.report.overview_table import explain_cpu_speeds, overview_columns, summarize
from distexp.report.page.mesh import device_meshes
from distexp.runs.record import FAILURES
from distexp.runs.run_dir import LOGS, MEMORY, METRICS, PROFILE, RECORD
from distexp.system.files import nan_to_none
from distexp.tables.columns import TextTable

# Builds the page from its template, style, script, data and two libraries; and writes ``results.md``.


MAX_NOTES = 20
PAGE_FILES = files("distexp.report.page")


def write_page(overview: Overview, figures: Sequence[Figure], path: Path, skipped: Sequence[str] = ()) -> None:
    """Write the page. Its links are relative to its folder."""
    notes = [*skipped, *failure_notes(overview.rows)]
    remarks = list(explain_cpu_speeds(overview))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    charts = [(figure, n) for figure in figures for n in range(len(figure.panels))]
    zoomed = {
        f"{figure.name}-{n}": figure.panel_spec(figure.panels[n].chart)
        for figure, n in charts if figure.panels[n].still is not None
    }  # fmt: skip
    runs, statuses = run_table(overview, path.parent), Counter(row.record.status for row in overview.rows)
    data = {"runs": runs, "configurations": configurations(overview), "charts": zoomed}
    leading = count_leading(overview, figures)
    text = environment.from_string((PAGE_FILES / "page.html").read_text()).render(
        title=join_first(dict.fromkeys(row.record.run.name for row in overview.rows), 3),
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        counts=", ".join(f"{count:,} {status}" for status, count in statuses.items()),
        has_failed=bool(FAILURES & set(statuses)),
        headline=[*headline(overview), *remarks],
        reasons=list(reasons(overview)),
        tiles=list(build_tiles(overview)),
        command=repeat_command(overview),
        leading=figures[:leading],
        others=figures[leading:],
        drawn={f"{figure.name}-{n}": Markup(_draw(figure, n)) for figure, n in charts},
        zoomed=zoomed,
        columns=[column["title"] for column in runs["columns"][:-1]],
        rows=[still_cells(runs["columns"], n, cells) for n, cells in enumerate(runs["rows"][:MAX_STILL_ROWS])],
        more_rows=len(runs["rows"]) - MAX_STILL_ROWS,
        summary=[sentence for sentence in summarize(overview) if sentence not in remarks],
        notes=notes[:MAX_NOTES],
        more_notes=max(0, len(notes) - MAX_NOTES),
        exercises=list(exercise_tables(overview)),
        can_compare=len(overview.rows) > 1,
        link=lambda target: relative_link(target, path.parent),
        meshes=list(device_meshes(overview.rows)),
        provenance=list(provenance_tables(overview.rows)),
        palettes={"light": LIGHT, "dark": DARK},
        style=Markup((PAGE_FILES / "page.css").read_text()),
        table_style=escape_closing_tags(read_table_library(".css")),
        table_library=compress(read_table_library(".js")),
        chart_library=compress(bundle_chart_library()) if zoomed else "",
        script=escape_closing_tags((PAGE_FILES / "page.js").read_text()),
        data=compress(json.dumps(nan_to_none(data), separators=(",", ":"), allow_nan=False)),
    )
    path.write_text(text)


def _draw(figure: Figure, index: int) -> str:
    label = escape(": ".join(filter(None, (figure.title, figure.panels[index].title))))
    tag = f'<svg role="graphics-document" aria-label="{label}" '  # not img, because its marks are links
    drawn = ((kind, svg.replace("<svg ", tag, 1)) for kind, svg in figure.draw_panel(index))
    return "".join(f'<div class="{kind}">{svg}</div>' for kind, svg in drawn)


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


LATEX = str.maketrans({
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\n": " ",
})  # fmt: skip


def format_tables(overview: Overview, figures: Sequence[Figure]) -> Iterator[tuple[str, str]]:
    """Yield name and text of a Markdown and a LaTeX file of each table: of the runs, and those of the figures."""
    columns = list(overview_columns(overview))
    cells = tuple(zip(*(column.cells for column in columns), strict=True))
    tables = [("runs", TextTable("Runs", tuple(column.one_line_title for column in columns), cells))]
    tables += [(f"{one.name}_{n}", table) for one in figures for n, table in enumerate(one.tables, start=1)]
    tables += [(f"exercise_{n}", table) for n, table in enumerate(exercise_tables(overview), start=1)]
    for name, table in tables:
        right = [
            all(row[n] == "-" or row[n][:1] in "+-~0123456789" for row in table.rows) for n in range(len(table.header))
        ]
        notes = [text for text in (*table.reasons, table.note) if text]
        yield (
            f"{name}.md",
            "\n".join([f"{table.title}:", "", *_table(table.header, table.rows, right), *map(_escape, notes)]),
        )
        yield f"{name}.tex", "\n".join(_latex_lines(table, right))


def _latex_lines(table: TextTable, right: Sequence[bool]) -> Iterator[str]:
    """Yield the lines of a table of the LaTeX package booktabs."""
    yield f"% {' '.join(table.title.split())}. It needs \\usepackage{{booktabs}}."
    yield f"\\begin{{tabular}}{{{''.join('r' if one else 'l' for one in right)}}}"
    rows = [" & ".join(cell.translate(LATEX) for cell in cells) + r" \\" for cells in (table.header, *table.rows)]
    yield from (r"\toprule", rows[0], r"\midrule", *rows[1:], r"\bottomrule", r"\end{tabular}", "")


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[bool] = ()) -> list[str]:
    """Return the lines of a table; ``right`` has whether a column is right-aligned."""
    ruler = ["---:" if n < len(right) and right[n] else "---" for n in range(len(header))]
    return [_line(header), _line(ruler), *map(_line, rows), ""]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_escape(cell) for cell in cells)} |"


def _escape(text: str) -> str:
    return " ".join(text.splitlines()).replace("|", "\\|").replace("<", "&lt;")


# Data of the page: tiles, the table of runs, configurations to compare, machines and versions.


COMPARED_SECTIONS = ("config.", "built.", "environment.")
COMPARED_KEYS = ("overrides", "git_sha")
MAX_COMMANDS = 200
MAX_STILL_ROWS = 200  # of the table without scripts
Cells = tuple[str, ...]
VERSIONS = ("python", "torch", "cuda", "nccl", "transformers", "deepspeed")
LINKED_FILES = (RECORD, METRICS, MEMORY, LOGS, PROFILE)
MAX_CHARACTERS = 48  # of a setting


def configurations(overview: Overview) -> dict[str, Any]:
    """Return all keys of configuration, build and environment.

    A key of ``differing`` lists each value once, and for each run the index of its value. Other keys are ``shared``.
    """
    rows = [_compared(row) for row in overview.rows]
    shared: dict[str, Any] = {}
    differing: dict[str, Any] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        texts = [row.get(key, "-") for row in rows]
        indices = {text: index for index, text in enumerate(dict.fromkeys(texts))}
        if len(indices) == 1:
            shared[key] = texts[0]
        else:
            differing[key] = {"values": list(indices), "indices": [indices[text] for text in texts]}
    names = {row.label: overview.format_settings(group) for group in overview.groups for row in group.rows}
    runs = [[row.label, names[row.label]] for row in overview.rows]
    return {"shared": shared, "differing": differing, "runs": runs, "opened": list(first_pair(overview))}


def first_pair(overview: Overview) -> tuple[int, int]:
    """Return which two runs to compare first: the baseline and another completed one, or those that got furthest."""
    baseline = overview.baseline.rows if overview.baseline else ()

    def preference(position: int) -> tuple[bool, bool, bool]:
        row = overview.rows[position]
        return not row.completed, row.record.status == "invalid", not any(row is other for other in baseline)

    best = sorted(range(len(overview.rows)), key=preference)
    return best[0], best[min(1, len(best) - 1)]


def _compared(row: Row) -> dict[str, str]:
    content = {**result_row(row), "overrides": " ".join(row.record.run.overrides) or None}
    kept = {key: value for key, value in content.items() if key.startswith(COMPARED_SECTIONS) or key in COMPARED_KEYS}
    return {
        key: "null" if value is None else value if isinstance(value, str) else json.dumps(value)
        for key, value in kept.items()
    }


def provenance_tables(rows: Sequence[Row]) -> Iterator[TextTable]:
    """Yield the tables. The last column of each row lists its runs."""
    yield _count_kinds("Machines", ("hosts", "GPU", "GPU memory (MiB)", "CPU cores"), rows, _machine)
    yield _count_kinds("Versions", VERSIONS, rows, lambda row: tuple(
        str(getattr(row.record.environment, name, None) or "-") for name in VERSIONS
    ))  # fmt: skip
    changed = {True: "yes", False: "no", None: "unknown"}
    yield _count_kinds("Code", ("git commit", "uncommitted changes"), rows, lambda row: (
        row.record.run.git_sha or "unknown", changed[row.record.run.git_dirty]
    ))  # fmt: skip
    shown = tuple(
        (row.label, typed_command(row), (run.started_at or "-")[:19].replace("T", " "))
        for row, run in ((row, row.record.run) for row in rows[:MAX_COMMANDS])
    )
    more = len(rows) - MAX_COMMANDS
    note = f"{more} more runs are in results.csv, column overrides." if more > 0 else ""
    yield TextTable("Commands", ("run", "command", "started (UTC)"), shown, note)


def _count_kinds(title: str, header: Cells, rows: Sequence[Row], read: Callable[[Row], Cells]) -> TextTable:
    counts: dict[Cells, list[str]] = {}
    for row in rows:
        counts.setdefault(read(row), []).append(row.label)
    cells = tuple((*kind, "all" if len(labels) == len(rows) else join_first(labels)) for kind, labels in counts.items())
    return TextTable(title, (*header, "runs"), cells)


def _machine(row: Row) -> Cells:
    environment = row.record.environment
    hosts = ", ".join(row.record.run.hosts) or (environment.hostname if environment else None) or "-"
    if environment is None:
        return hosts, "-", "-", "-"
    memory = f"{environment.gpu_total_mib:,.0f}" if environment.gpu_total_mib else "-"
    return hosts, environment.gpu_name or "none", memory, str(environment.cpu_count or "-")


def run_table(overview: Overview, directory: Path) -> dict[str, Any]:
    """Return columns and rows. Links are relative to the directory of the page.

    The most important metrics come first, because a narrow window shows only the first columns.
    """
    metrics = sorted(overview.metrics(), key=lambda metric: -metric.importance)
    numbered = all(row.label.isdigit() for row in overview.rows)
    columns = [
        {"title": "run", "kind": "setting-number" if numbered else "text"},
        *(_setting_column(overview, name) for name in overview.varied),
        {"title": "status", "kind": "status"},
        *(_metric_column(overview, metric) for metric in metrics),
        {"title": "files", "kind": "files"},
    ]
    rows = [
        [
            int(row.label) if numbered else row.label,
            *(_setting_cell(row.settings.get(name)) for name in overview.varied),
            [row.record.status, "" if row.completed else failure_reason(row)],
            *(_metric_cell(row.metrics[metric.name], metric) for metric in metrics),
            _links(row, directory),
        ]
        for row in overview.rows
    ]
    return {"columns": columns, "rows": rows}


def still_cells(columns: Sequence[dict[str, Any]], number: int, cells: Sequence[Any]) -> list[str]:
    """Return the texts of a row for a browser without scripts; the last column, of links, is left out."""
    pairs = zip(columns[:-1], cells[:-1], strict=True)
    return ["-" if cell is None else _still_cell(column, number, cell) for column, cell in pairs]


def _still_cell(column: dict[str, Any], number: int, cell: Any) -> str:
    if column["kind"] == "status":
        return str(cell[0])
    if column["kind"] != "number":
        return str(cell)
    replaced = column.get("texts", [""] * (number + 1))[number]
    return str(replaced) or f"{cell:z,.{column['digits']}f}" + column.get("marks", [""] * (number + 1))[number]


def _setting_column(overview: Overview, name: str) -> dict[str, Any]:
    values = [value for row in overview.rows if (value := row.settings.get(name)) is not None]
    return {"title": name, "kind": "setting-number" if values and all(map(_is_number, values)) else "text"}


def _setting_cell(value: Any) -> Any:
    return value if _is_number(value) or value is None else format_setting(value, MAX_CHARACTERS)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _metric_column(overview: Overview, metric: Metric) -> dict[str, Any]:
    title = metric.title.replace("-\n", "").replace("\n", " ")
    column = {"title": title, "kind": "number", "digits": _digits(metric)}
    of_group = {id(row): overview.mark(metric.name, group) for group in overview.groups for row in group.rows}
    # The repeats of a disturbed run may be undisturbed.
    speeds = [row for row in overview.rows if metric.name in (SPEED, SPEEDUP, EFFICIENCY)]
    disturbed = {id(row) for row in speeds if row.metrics[metric.name] is not None and row.disturbance is not None}
    marks = [DISTURBED_MARK if id(row) in disturbed else of_group[id(row)] for row in overview.rows]
    if metric.name in (SPEEDUP, EFFICIENCY):
        return column | {"texts": [EQUAL if mark == NOISE_MARK else mark for mark in marks]} if any(marks) else column
    return column | {"marks": marks} if any(marks) else column


def _digits(metric: Metric) -> int:
    found = re.search(r"\.(\d+)f", metric.number_format)
    return int(found[1]) if found else 0


def _metric_cell(value: float | None, metric: Metric) -> float | None:
    return None if value is None else round(value * metric.factor, _digits(metric) + 2)


def _links(row: Row, directory: Path) -> list[str]:
    if row.path is None:
        return []
    present = set(os.listdir(row.path.parent))
    return [relative_link(row.path.parent, directory), *(name for name in LINKED_FILES if name in present)]


def relative_link(path: Path, directory: Path) -> str:
    """Return a link from a page in a directory to a path."""
    return quote(os.path.relpath(path, directory))

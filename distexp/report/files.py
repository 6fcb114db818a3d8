"""``results.csv``, ``results.parquet``, ``results.md``, ``report.html`` and the pictures, from the same runs.

The first two have a row a run and every column; the last is the table of the terminal, at any width.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distexp.report.data.metrics import METRICS
from distexp.report.data.overview import Overview
from distexp.report.data.result_rows import ResultRow, column_names, result_row
from distexp.report.exercises import exercise_tables
from distexp.report.summary import summarize
from distexp.report.table import overview_columns
from distexp.runs.files import replace_atomically

if TYPE_CHECKING:
    from distexp.report.figures.base import Figure

PAGE = "report.html"


def write_files(
    overview: Overview, directory: Path, traced_runs: Sequence[str] = (), skipped: Sequence[str] = ()
) -> list[Path]:
    """Writes all files, each whole or not at all, and returns them; OSError where it cannot.

    ``traced_runs`` are the labels of those to draw over time, ``skipped`` sentences on records left out.
    """
    # Here, so that the table after a sweep waits for no plotting library.
    from distexp.report.figures import build_figures
    from distexp.report.figures.base import render_files
    from distexp.report.page.build import write_page
    from distexp.report.traces import load_traces

    directory.mkdir(parents=True, exist_ok=True)
    rows = [result_row(row) for row in overview.rows]
    names = column_names(rows)
    figures = build_figures(overview, load_traces(overview, traced_runs))
    drawn = list(render_files(figures, directory / "plots"))
    for path, content in drawn:
        path.parent.mkdir(exist_ok=True)
        _write(path, partial(_bytes, content))
    return [
        _write(directory / "results.csv", lambda path: write_csv(rows, names, path)),
        _write(directory / "results.md", lambda path: write_markdown(overview, figures, path)),
        _write(directory / "results.parquet", lambda path: write_parquet(rows, names, path)),
        *(path for path, _ in drawn),
        _write(directory / PAGE, lambda path: write_page(overview, figures, path, skipped)),
    ]


def write_csv(rows: Sequence[ResultRow], names: Sequence[str], path: Path) -> None:
    """Writes comma-separated values; what was not measured is empty."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval=None)
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(rows: Sequence[ResultRow], names: Sequence[str], path: Path) -> None:
    """Writes typed columns; figures are doubles even where no run has them, so that files can be joined."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    figures = {figure.name for figure in METRICS}
    arrays = {}
    for name in names:
        values = [row.get(name) for row in rows]
        if name in figures:
            arrays[name] = pa.array(values, pa.float64())
        else:
            arrays[name] = _column(pa, values)
    pq.write_table(pa.table(arrays), path)


def _column(pa: Any, values: list[Any]) -> Any:
    """One type for a column whose runs may disagree (``max_length: 64`` here, ``auto`` there)."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    if kinds == {int}:
        return pa.array(values, pa.int64())
    if kinds and kinds <= {int, float}:
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array([None if value is None else str(value) for value in values], pa.string())


def write_markdown(overview: Overview, figures: Sequence[Figure], path: Path) -> None:
    """Writes the table of runs, why some did not complete, the sentences, and what each figure says."""
    columns = list(overview_columns(overview))
    lines = [
        *_table([column.one_line_title for column in columns], zip(*(column.cells for column in columns), strict=True),
                [column.right for column in columns]),
        *(f"- {_escape(note)}" for note in overview.notes()),
        "",
        *(_escape(sentence) + "  " for sentence in summarize(overview)),
    ]  # fmt: skip
    for table in exercise_tables(overview):
        lines += ["", f"## {table.title}", "", *_table(table.header, table.rows), _escape(table.note)]
    for figure in figures:
        picture = [f"![{figure.title}](plots/{figure.name}.svg)", ""] if figure.panels else []
        lines += ["", f"## {figure.title}", "", *picture, _escape(figure.caption), ""]
        for table in figure.tables:
            lines += [f"{table.title}:", "", *_table(table.header, table.rows)]
        lines += [f"- {_escape(sentence)}" for sentence in figure.sentences]
    path.write_text("\n".join(lines) + "\n")


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[bool] = ()) -> list[str]:
    ruler = ["---:" if n < len(right) and right[n] else "---" for n in range(len(header))]
    return [_line(header), _line(ruler), *map(_line, rows), ""]


def _bytes(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_escape(cell) for cell in cells)} |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _write(path: Path, write: Callable[[Path], None]) -> Path:
    with replace_atomically(path) as temporary:
        write(temporary)
    return path

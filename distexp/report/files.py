"""Files of a report: results as CSV, Parquet and Markdown, page and figures."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distexp.report.data.metrics import METRICS
from distexp.report.data.overview import Overview
from distexp.report.data.result_rows import ResultRow, column_names, result_row
from distexp.runs.files import replace_atomically

if TYPE_CHECKING:
    import pyarrow as pa

PAGE = "report.html"
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def write_files(
    overview: Overview, directory: Path, traced_runs: Sequence[str] = (), skipped: Sequence[str] = ()
) -> list[Path]:
    """Write all files of a report. Each is written completely or not at all.

    Args:
        overview: The runs.
        directory: Where to write. It is created if missing.
        traced_runs: Labels of the runs to draw over time; empty for the most informative ones.
        skipped: Messages on records that could not be read.

    Returns:
        The paths of the files.

    Raises:
        OSError: if a file cannot be written.
    """
    # Imported here, because the table after a sweep should not wait for plotting libraries.
    from distexp.report.figures import build_figures
    from distexp.report.figures.base import render_files
    from distexp.report.markdown import write_markdown
    from distexp.report.page.build import write_page
    from distexp.report.traces import load_traces

    directory.mkdir(parents=True, exist_ok=True)
    rows = [result_row(row) for row in overview.rows]
    names = column_names(rows)
    figures = build_figures(overview, load_traces(overview, traced_runs))
    images = list(render_files(figures, directory / "plots"))
    for path, content in images:
        path.parent.mkdir(exist_ok=True)
        _replace(path, partial(_write_bytes, content))
    return [
        _replace(directory / "results.csv", lambda path: write_csv(rows, names, path)),
        _replace(directory / "results.md", lambda path: write_markdown(overview, figures, path)),
        _replace(directory / "results.parquet", lambda path: write_parquet(rows, names, path)),
        *(path for path, _ in images),
        _replace(directory / PAGE, lambda path: write_page(overview, figures, path, skipped)),
    ]


def write_csv(rows: Sequence[ResultRow], names: Sequence[str], path: Path) -> None:
    """Write comma-separated values. A value that was not measured is empty.

    A text that a spreadsheet would take for a formula gets an apostrophe.
    """
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval=None)
        writer.writeheader()
        writer.writerows({name: _as_text(value) for name, value in row.items()} for row in rows)


def _as_text(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_STARTS) else value


def write_parquet(rows: Sequence[ResultRow], names: Sequence[str], path: Path) -> None:
    """Write typed columns.

    Metrics are doubles even if no run has them, so that files can be concatenated.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    metrics = {metric.name for metric in METRICS}
    columns = {name: [row.get(name) for row in rows] for name in names}
    arrays = {
        name: pa.array(values, pa.float64()) if name in metrics else _typed_array(values)
        for name, values in columns.items()
    }
    pq.write_table(pa.table(arrays), path)


def _typed_array(values: list[Any]) -> pa.Array:
    """Return an array of one type: strings for mixed types, as ``64`` and ``auto``."""
    import pyarrow as pa

    types = {type(value) for value in values if value is not None}
    if types == {bool}:
        return pa.array(values, pa.bool_())
    if types == {int}:
        return pa.array(values, pa.int64())
    if types and types <= {int, float}:
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array([None if value is None else str(value) for value in values], pa.string())


def _write_bytes(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def _replace(path: Path, write: Callable[[Path], None]) -> Path:
    with replace_atomically(path) as temporary:
        write(temporary)
    return path

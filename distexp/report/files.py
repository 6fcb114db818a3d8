"""Writes all files of a report: results, page and figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from distexp.report.data.overview import Overview
from distexp.report.data.result_rows import column_names, result_row
from distexp.report.result_files import write_csv, write_parquet
from distexp.runs.files import replace_atomically

PAGE = "report.html"


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
    images = [_write_image(path, content) for path, content in list(render_files(figures, directory / "plots"))]
    return [
        _replace(directory / "results.csv", lambda path: write_csv(rows, names, path)),
        _replace(directory / "results.md", lambda path: write_markdown(overview, figures, path)),
        _replace(directory / "results.parquet", lambda path: write_parquet(rows, names, path)),
        *images,
        _replace(directory / PAGE, lambda path: write_page(overview, figures, path, skipped)),
    ]


def _write_image(path: Path, content: bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    return _replace(path, lambda temporary: _write_bytes(temporary, content))


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _replace(path: Path, write: Callable[[Path], None]) -> Path:
    with replace_atomically(path) as temporary:
        write(temporary)
    return path

"""Writes all files of a report: results as CSV and Parquet, page and figures."""

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distexp.config.fields import flatten
from distexp.report.data.metrics import METRICS
from distexp.report.data.overview import Overview
from distexp.report.data.rows import WORKERS, Row
from distexp.system.files import replace_atomically

PAGE, PLOTS = "report.html", "plots"
ResultRow = dict[str, Any]


def write_files(
    overview: Overview, directory: Path, traced_runs: Sequence[str] = (), skipped: Sequence[str] = ()
) -> list[Path]:
    """Write all files of a report, each completely or not at all; return their paths, or raise OSError.

    Without labels of ``traced_runs`` the most informative runs are drawn. ``skipped`` are messages on other records.
    """
    # Imported here, because the table after a sweep should not wait for plotting libraries.
    from distexp.report.figures import build_figures
    from distexp.report.figures.base import render_files
    from distexp.report.page import write_markdown, write_page
    from distexp.report.traces import load_traces

    directory.mkdir(parents=True, exist_ok=True)
    rows = [result_row(row) for row in overview.rows]
    names = column_names(rows)
    figures = build_figures(overview, load_traces(overview, traced_runs))
    images = [_write_image(path, content) for path, content in list(render_files(figures, directory / PLOTS))]
    return [
        _replace(directory / "results.csv", lambda path: write_csv(rows, names, path)),
        _replace(directory / "results.md", lambda path: write_markdown(overview, figures, path)),
        _replace(directory / "results.parquet", lambda path: write_parquet(rows, names, path)),
        *images,
        _replace(directory / PAGE, lambda path: write_page(overview, figures, path, skipped)),
    ]


def write_figures(overview: Overview, directory: Path, traced_runs: Sequence[str] = ()) -> list[Path]:
    """Write figures as SVG, PDF and PNG and tables as Markdown and LaTeX, for a paper or slides; or raise OSError."""
    from distexp.report.figures import build_figures
    from distexp.report.figures.base import render_files
    from distexp.report.page import format_tables
    from distexp.report.traces import load_traces

    directory.mkdir(parents=True, exist_ok=True)
    figures = build_figures(overview, load_traces(overview, traced_runs))
    tables = ((directory / name, text.encode()) for name, text in format_tables(overview, figures))
    return [
        _write_image(path, content) for path, content in (*render_files(figures, directory, with_pdf=True), *tables)
    ]


def _write_image(path: Path, content: bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    return _replace(path, lambda temporary: temporary.write_bytes(content))


def _replace(path: Path, write: Callable[[Path], object]) -> Path:
    with replace_atomically(path) as temporary:
        write(temporary)
    return path


def write_csv(rows: Sequence[ResultRow], names: Sequence[str], path: Path) -> None:
    """Write comma-separated values. A text that a spreadsheet would take for a formula gets an apostrophe."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval=None)
        writer.writeheader()
        writer.writerows({name: _as_text(value) for name, value in row.items()} for row in rows)


def _as_text(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def write_parquet(rows: Sequence[ResultRow], names: Sequence[str], path: Path) -> None:
    """Write typed columns. Metrics are doubles even if no run has them, so that files can be concatenated."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
    metrics, arrays = {metric.name for metric in METRICS}, {}
    for name in names:
        values = [row.get(name) for row in rows]
        types = {float} if name in metrics else {type(value) for value in values if value is not None}
        kind: Any = float if types == {int, float} else str  # Other mixed types, as ``64`` and ``auto``, are strings.
        if len(types) == 1:
            kind = next(one if one in kinds else str for one in types)
        arrays[name] = pa.array([None if value is None else kind(value) for value in values], kinds[kind])
    pq.write_table(pa.table(arrays), path)


def result_row(row: Row) -> ResultRow:
    """Return all values of a run by column; lists are JSON, None is not measured."""
    record, run, error = row.record, row.record.run, row.record.error
    found: ResultRow = {
        "run": row.label,
        "run_id": run.id,
        "name": run.name,
        "number": run.number,
        "overrides": " ".join(run.overrides),
        "status": record.status,
        "disturbance": row.disturbance,
        **{f"error_{key}": getattr(error, key, None) for key in ("type", "message", "phase", "rank")},
        "started_at": run.started_at,
        "hosts": " ".join(run.hosts),
        "git_sha": run.git_sha,
        "world_size": row.settings[WORKERS],
        **row.metrics,
        **{f"config.{key}": value for key, value in flatten(record.config)},
        **_section("built", record.built),
        **_section("environment", record.environment),
        "record": str(row.path) if row.path else None,
    }
    return {name: json.dumps(value) if isinstance(value, list) else value for name, value in found.items()}


def _section(name: str, section: object | None) -> ResultRow:
    return {} if section is None else {f"{name}.{key}": value for key, value in vars(section).items()}


def column_names(rows: Sequence[ResultRow]) -> list[str]:
    """Return the column names of some rows; the path of the record is the last."""
    return [*dict.fromkeys(name for row in rows for name in row if name != "record"), "record"]

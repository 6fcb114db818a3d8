"""``results.csv``, ``results.parquet``, ``results.md``: the same runs for a spreadsheet, a notebook, a page.

The first two have a row a run and every column; the last is the table of the terminal, at any width.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distexp.report.figures import FIGURES
from distexp.report.frame import Row
from distexp.report.overview import Overview
from distexp.report.sentences import sentences
from distexp.report.settings import flatten
from distexp.report.table import overview_columns

Flat = dict[str, Any]


def write_files(overview: Overview, directory: Path) -> list[Path]:
    """Writes the three files, each whole or not at all, and returns them; OSError where it cannot."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = [flat(row) for row in overview.rows]
    names = columns_of(rows)
    return [
        _write(directory / "results.csv", lambda path: write_csv(rows, names, path)),
        _write(directory / "results.md", lambda path: write_markdown(overview, path)),
        _write(directory / "results.parquet", lambda path: write_parquet(rows, names, path)),
    ]


def flat(row: Row) -> Flat:
    """Everything about a run under flat names; lists as JSON, None where nothing was measured."""
    record, built, environment = row.record, row.record.built, row.record.environment
    error = record.error
    found: Flat = {
        "run": row.label,
        "run_id": record.run.id,
        "name": record.run.name,
        "number": record.run.number,
        "overrides": " ".join(record.run.overrides),
        "status": record.status,
        "error_type": error.type if error else None,
        "error_message": error.message if error else None,
        "error_phase": error.phase if error else None,
        "error_rank": error.rank if error else None,
        "started_at": record.run.started_at,
        "hosts": " ".join(record.run.hosts),
        "git_sha": record.run.git_sha,
        "world_size": row.settings["workers"],
        **row.figures,
        **{f"config.{key}": value for key, value in flatten(record.config)},
        **{f"built.{key}": value for key, value in (vars(built) if built else {}).items()},
        **{f"environment.{key}": value for key, value in (vars(environment) if environment else {}).items()},
        "record": str(row.path) if row.path else None,
    }
    return {name: json.dumps(value) if isinstance(value, list) else value for name, value in found.items()}


def columns_of(rows: Sequence[Flat]) -> list[str]:
    """Every name of any row, the path of the record last."""
    names = dict.fromkeys(name for row in rows for name in row)
    del names["record"]
    return [*names, "record"]


def write_csv(rows: Sequence[Flat], names: Sequence[str], path: Path) -> None:
    """Writes comma-separated values; what was not measured is empty."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval=None)
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(rows: Sequence[Flat], names: Sequence[str], path: Path) -> None:
    """Writes typed columns; figures are doubles even where no run has them, so that files can be joined."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    figures = {figure.name for figure in FIGURES}
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


def write_markdown(overview: Overview, path: Path) -> None:
    """Writes the table of runs, why some did not complete, and the sentences."""
    columns = list(overview_columns(overview))
    lines = [
        _line([column.spoken for column in columns]),
        _line(["---:" if column.right else "---" for column in columns]),
        *(_line(cells) for cells in zip(*(column.cells for column in columns), strict=True)),
        "",
        *(f"- {_escape(note)}" for note in overview.notes()),
        "",
        *(_escape(sentence) + "  " for sentence in sentences(overview)),
    ]
    path.write_text("\n".join(lines) + "\n")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_escape(cell) for cell in cells)} |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _write(path: Path, write: Callable[[Path], None]) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path

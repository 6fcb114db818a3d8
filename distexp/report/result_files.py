"""Results of all runs as CSV and Parquet."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distexp.report.data.metrics import METRICS
from distexp.report.data.result_rows import ResultRow

if TYPE_CHECKING:
    import pyarrow as pa

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


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

"""Rows of ``results.csv`` and ``results.parquet``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from distexp.config.flatten import flatten
from distexp.report.data.rows import Row
from distexp.report.data.setting_names import WORKERS

ResultRow = dict[str, Any]


def result_row(row: Row) -> ResultRow:
    """Return all values of a run by column; lists are JSON, None is not measured."""
    record, built, environment = row.record, row.record.built, row.record.environment
    error = record.error
    found: ResultRow = {
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
        "world_size": row.settings[WORKERS],
        **row.metrics,
        **{f"config.{key}": value for key, value in flatten(record.config)},
        **{f"built.{key}": value for key, value in (vars(built) if built else {}).items()},
        **{f"environment.{key}": value for key, value in (vars(environment) if environment else {}).items()},
        "record": str(row.path) if row.path else None,
    }
    return {name: json.dumps(value) if isinstance(value, list) else value for name, value in found.items()}


def column_names(rows: Sequence[ResultRow]) -> list[str]:
    """Return the column names of some rows; the path of the record is the last."""
    names = dict.fromkeys(name for row in rows for name in row)
    del names["record"]
    return [*names, "record"]

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
    record = row.record
    found: ResultRow = {
        "run": row.label,
        **_run_values(row),
        "world_size": row.settings[WORKERS],
        **row.metrics,
        **{f"config.{key}": value for key, value in flatten(record.config)},
        **_section("built", record.built),
        **_section("environment", record.environment),
        "record": str(row.path) if row.path else None,
    }
    return {name: json.dumps(value) if isinstance(value, list) else value for name, value in found.items()}


def _run_values(row: Row) -> ResultRow:
    """Return what identifies a run, and how it ended."""
    record, run, error = row.record, row.record.run, row.record.error
    return {
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
    }


def _section(name: str, section: object | None) -> ResultRow:
    """Return the fields of a section of a record; none if the record lacks it."""
    return {} if section is None else {f"{name}.{key}": value for key, value in vars(section).items()}


def column_names(rows: Sequence[ResultRow]) -> list[str]:
    """Return the column names of some rows; the path of the record is the last."""
    names = dict.fromkeys(name for row in rows for name in row)
    del names["record"]
    return [*names, "record"]

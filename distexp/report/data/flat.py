"""Everything about a run under one level of names, as files of rows and columns want it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from distexp.report.data.rows import Row
from distexp.report.data.short_names import flatten

Flat = dict[str, Any]


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
        **row.metrics,
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

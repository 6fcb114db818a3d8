"""The rows of the page's table of runs, and what its comparison of two configurations looks up."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from distexp.report.data.failures import failure_reason
from distexp.report.data.metrics import Metric
from distexp.report.data.overview import Overview
from distexp.report.data.result_rows import result_row
from distexp.report.data.rows import Row
from distexp.report.data.settings import format_setting

FILES = ("record.json", "metrics.jsonl", "memory", "logs")
COMPARED = ("config.", "built.", "environment.")


def run_table(overview: Overview, directory: Path) -> dict[str, Any]:
    """Columns and rows; links are relative to the directory of the page."""
    metrics = list(overview.metrics())
    names = list(overview.varied)
    numbered = all(row.label.isdigit() for row in overview.rows)
    columns = [
        {"title": "run", "kind": "setting-number" if numbered else "text"},
        *({"title": name, "kind": _kind([row.settings.get(name) for row in overview.rows])} for name in names),
        {"title": "status", "kind": "status"},
        *(_column(metric) for metric in metrics),
        {"title": "files", "kind": "files"},
    ]
    rows = [
        [
            int(row.label) if numbered else row.label,
            *(_setting(row.settings.get(name)) for name in names),
            [row.record.status, "" if row.completed else failure_reason(row)],
            *(_rounded(row.metrics[metric.name], metric) for metric in metrics),
            _links(row, directory),
        ]
        for row in overview.rows
    ]
    return {"columns": columns, "rows": rows}


def _kind(values: Sequence[Any]) -> str:
    numbers = [isinstance(value, (int, float)) and not isinstance(value, bool) for value in values if value is not None]
    return "setting-number" if numbers and all(numbers) else "text"


def _setting(value: Any) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number or value is None else format_setting(value, 48)


def _column(metric: Metric) -> dict[str, Any]:
    title = metric.title.replace("-\n", "").replace("\n", " ")
    return {"title": title, "kind": "number", "digits": _digits(metric)}


def _digits(metric: Metric) -> int:
    found = re.search(r"\.(\d+)f", metric.number_format)
    return int(found[1]) if found else 0


def _rounded(value: float | None, metric: Metric) -> float | None:
    return None if value is None else round(value * metric.factor, _digits(metric) + 2)


def _links(row: Row, directory: Path) -> list[str]:
    """The run's folder, and those of FILES that it has."""
    if row.path is None:
        return []
    here = os.path.relpath(row.path.parent, directory)
    present = set(os.listdir(row.path.parent))
    return [quote(here), *(name for name in FILES if name in present)]


def configurations(overview: Overview) -> dict[str, Any]:
    """Every key of configuration, build and environment: once where all agree, else each value once."""
    rows = [_compared(row) for row in overview.rows]
    shared: dict[str, Any] = {}
    differing: dict[str, Any] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        texts = [row.get(key, "-") for row in rows]
        kinds = list(dict.fromkeys(texts))
        if len(kinds) == 1:
            shared[key] = kinds[0]
        else:
            numbers = {text: number for number, text in enumerate(kinds)}
            differing[key] = {"values": kinds, "of": [numbers[text] for text in texts]}
    names = {row.label: overview.format_settings(group) for group in overview.groups for row in group.rows}
    runs = [[row.label, names[row.label]] for row in overview.rows]
    return {"shared": shared, "differing": differing, "runs": runs}


def _compared(row: Row) -> dict[str, str]:
    content = {**result_row(row), "overrides": " ".join(row.record.run.overrides) or None}
    kept = {key: value for key, value in content.items() if key.startswith(COMPARED) or key in ("overrides", "git_sha")}
    return {
        key: "null" if value is None else value if isinstance(value, str) else json.dumps(value)
        for key, value in kept.items()
    }

"""Data of the page's table of runs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from distexp.report.data.failures import failure_reason
from distexp.report.data.metrics import EFFICIENCY, SPEED, SPEEDUP, Metric
from distexp.report.data.overview import DISTURBED_MARK, Overview
from distexp.report.data.rows import Row
from distexp.report.data.settings import format_setting
from distexp.runs.run_dir import LOGS, MEMORY, METRICS, PROFILE, RECORD

LINKED_FILES = (RECORD, METRICS, MEMORY, LOGS, PROFILE)
MAX_CHARACTERS = 48  # of a setting


def run_table(overview: Overview, directory: Path) -> dict[str, Any]:
    """Return columns and rows. Links are relative to the directory of the page.

    The most important metrics come first, because a narrow window shows only the first columns.
    """
    metrics = sorted(overview.metrics(), key=lambda metric: -metric.importance)
    names = list(overview.varied)
    numbered = all(row.label.isdigit() for row in overview.rows)
    columns = [
        {"title": "run", "kind": "setting-number" if numbered else "text"},
        *(_setting_column(overview, name) for name in names),
        {"title": "status", "kind": "status"},
        *(_metric_column(overview, metric) for metric in metrics),
        {"title": "files", "kind": "files"},
    ]

    def cells(row: Row) -> list[Any]:
        return [
            int(row.label) if numbered else row.label,
            *(_setting_cell(row.settings.get(name)) for name in names),
            [row.record.status, "" if row.completed else failure_reason(row)],
            *(_metric_cell(row.metrics[metric.name], metric) for metric in metrics),
            _links(row, directory),
        ]

    return {"columns": columns, "rows": [cells(row) for row in overview.rows]}


def _setting_column(overview: Overview, name: str) -> dict[str, Any]:
    values = [value for row in overview.rows if (value := row.settings.get(name)) is not None]
    return {"title": name, "kind": "setting-number" if values and all(map(_is_number, values)) else "text"}


def _setting_cell(value: Any) -> Any:
    return value if _is_number(value) or value is None else format_setting(value, MAX_CHARACTERS)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _metric_column(overview: Overview, metric: Metric) -> dict[str, Any]:
    title = metric.title.replace("-\n", "").replace("\n", " ")
    column = {"title": title, "kind": "number", "digits": _digits(metric)}
    marks = _marks(overview, metric)
    return column | {"marks": marks} if any(marks) else column


def _marks(overview: Overview, metric: Metric) -> list[str]:
    """Return the mark behind a metric of each run."""
    marks = {id(row): overview.mark(metric.name, group) for group in overview.groups for row in group.rows}
    return [DISTURBED_MARK if _is_disturbed(row, metric) else marks[id(row)] for row in overview.rows]


def _is_disturbed(row: Row, metric: Metric) -> bool:
    """Return whether a metric is the speed of a disturbed run, whose repeats may be undisturbed."""
    is_speed = metric.name in (SPEED, SPEEDUP, EFFICIENCY) and row.metrics[metric.name] is not None
    return is_speed and row.disturbance is not None


def _digits(metric: Metric) -> int:
    found = re.search(r"\.(\d+)f", metric.number_format)
    return int(found[1]) if found else 0


def _metric_cell(value: float | None, metric: Metric) -> float | None:
    return None if value is None else round(value * metric.factor, _digits(metric) + 2)


def _links(row: Row, directory: Path) -> list[str]:
    """Return the run's directory, then its existing files of ``LINKED_FILES``."""
    if row.path is None:
        return []
    present = set(os.listdir(row.path.parent))
    return [relative_link(row.path.parent, directory), *(name for name in LINKED_FILES if name in present)]


def relative_link(path: Path, directory: Path) -> str:
    """Return a link from a page in a directory to a path."""
    return quote(os.path.relpath(path, directory))

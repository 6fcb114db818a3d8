"""Data of the page's table of runs, and of its comparison of two configurations."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from distexp.report.data.failures import failure_reason
from distexp.report.data.metrics import SPEEDUP, Metric
from distexp.report.data.overview import Overview
from distexp.report.data.result_rows import result_row
from distexp.report.data.rows import Row
from distexp.report.data.settings import format_setting
from distexp.runs.run_dir import LOGS, MEMORY, METRICS, PROFILE, RECORD

LINKED_FILES = (RECORD, METRICS, MEMORY, LOGS, PROFILE)
MAX_CHARACTERS = 48  # of a setting
COMPARED_SECTIONS = ("config.", "built.", "environment.")
COMPARED_KEYS = ("overrides", "git_sha")


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
    rows = [
        [
            int(row.label) if numbered else row.label,
            *(_setting_cell(row.settings.get(name)) for name in names),
            [row.record.status, "" if row.completed else failure_reason(row)],
            *(_metric_cell(row.metrics[metric.name], metric) for metric in metrics),
            _links(row, directory),
        ]
        for row in overview.rows
    ]
    return {"columns": columns, "rows": rows}


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
    return column | {"marks": _noise_marks(overview)} if metric.name == SPEEDUP else column


def _noise_marks(overview: Overview) -> list[str]:
    """Return the mark behind the speedup of each run."""
    marks = {id(row): overview.noise_mark(group) for group in overview.groups for row in group.rows}
    return [marks[id(row)] for row in overview.rows]


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


def configurations(overview: Overview) -> dict[str, Any]:
    """Return all keys of configuration, build and environment.

    A key with one value for all runs is in ``shared``. A key in ``differing`` lists each value once, and for each run
    the index of its value.
    """
    rows = [_compared(row) for row in overview.rows]
    shared: dict[str, Any] = {}
    differing: dict[str, Any] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        texts = [row.get(key, "-") for row in rows]
        kinds = list(dict.fromkeys(texts))
        if len(kinds) == 1:
            shared[key] = kinds[0]
        else:
            indices = {text: index for index, text in enumerate(kinds)}
            differing[key] = {"values": kinds, "indices": [indices[text] for text in texts]}
    names = {row.label: overview.format_settings(group) for group in overview.groups for row in group.rows}
    runs = [[row.label, names[row.label]] for row in overview.rows]
    return {"shared": shared, "differing": differing, "runs": runs, "opened": list(first_pair(overview))}


def first_pair(overview: Overview) -> tuple[int, int]:
    """Return the positions of the two runs to compare first: the baseline and another completed one.

    Without two completed runs, they are those that got furthest.
    """
    baseline = overview.baseline.rows if overview.baseline else ()

    def preference(position: int) -> tuple[bool, bool, bool]:
        row = overview.rows[position]
        return not row.completed, row.record.status == "invalid", not any(row is each for each in baseline)

    best = sorted(range(len(overview.rows)), key=preference)
    return best[0], best[min(1, len(best) - 1)]


def _compared(row: Row) -> dict[str, str]:
    content = {**result_row(row), "overrides": " ".join(row.record.run.overrides) or None}
    kept = {key: value for key, value in content.items() if key.startswith(COMPARED_SECTIONS) or key in COMPARED_KEYS}
    return {
        key: "null" if value is None else value if isinstance(value, str) else json.dumps(value)
        for key, value in kept.items()
    }

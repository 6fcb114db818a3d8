"""Data of the page's comparison of two configurations."""

from __future__ import annotations

import json
from typing import Any

from distexp.report.data.overview import Overview
from distexp.report.data.result_rows import result_row
from distexp.report.data.rows import Row

COMPARED_SECTIONS = ("config.", "built.", "environment.")
COMPARED_KEYS = ("overrides", "git_sha")


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
        return not row.completed, row.record.status == "invalid", not any(row is other for other in baseline)

    best = sorted(range(len(overview.rows)), key=preference)
    return best[0], best[min(1, len(best) - 1)]


def _compared(row: Row) -> dict[str, str]:
    content = {**result_row(row), "overrides": " ".join(row.record.run.overrides) or None}
    kept = {key: value for key, value in content.items() if key.startswith(COMPARED_SECTIONS) or key in COMPARED_KEYS}
    return {
        key: "null" if value is None else value if isinstance(value, str) else json.dumps(value)
        for key, value in kept.items()
    }

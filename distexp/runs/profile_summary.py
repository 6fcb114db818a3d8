"""``profile/summary.json``: lanes of one profiled step of each rank, for the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distexp.runs.files import replace_atomically
from distexp.runs.json_files import read_or_none
from distexp.runs.run_dir import profile_summary_path

SCHEMA = 1


def write_profile_summary(run_dir: Path, ranks: Sequence[dict[str, Any]], steps: int) -> None:
    """Write the lanes of all ranks.

    Args:
        run_dir: Directory of the run.
        ranks: For each rank ``rank``, ``step_ms`` and ``lanes``. Each lane has ``name`` and ``spans``: start and end
            in milliseconds since the start of the step, and a label. The file has the index of the label.
        steps: Number of profiled steps. The file has the lanes of the median one.
    """
    labels: dict[str, int] = {}
    numbered = [{**rank, "lanes": [_number_labels(lane, labels) for lane in rank["lanes"]]} for rank in ranks]
    path = profile_summary_path(run_dir)
    path.parent.mkdir(exist_ok=True)
    content = {"schema": SCHEMA, "steps": steps, "ranks": numbered, "labels": list(labels)}
    with replace_atomically(path) as temporary:
        temporary.write_text(json.dumps(content, separators=(",", ":")))


def _number_labels(lane: dict[str, Any], labels: dict[str, int]) -> dict[str, Any]:
    """Return a lane with the index of each label, after adding new labels."""
    spans = [[begin, end, labels.setdefault(label, len(labels))] for begin, end, label in lane["spans"]]
    return {**lane, "spans": spans}


def read_profile_summary(run_dir: Path) -> dict[str, Any] | None:
    """Return the content of the file, or None if there is none that this version can read."""
    content = read_or_none(profile_summary_path(run_dir))
    return content if isinstance(content, dict) and content.get("schema") == SCHEMA else None

"""Rows of a report: one run each, read from the records on disk; and how sentences name runs and numbers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from distexp.config.overrides import join_first
from distexp.report.data.metrics import read_metrics
from distexp.report.data.run_settings import read_settings
from distexp.runs.disturbance import describe_disturbance
from distexp.runs.record import RunRecord, find_records
from distexp.runs.run_dir import RECORD
from distexp.system.files import printable


@dataclass(frozen=True)
class Row:
    """One run with its settings and metrics by name; ``path`` is the record, if it was read from disk."""

    label: str
    record: RunRecord
    settings: dict[str, Any]
    metrics: dict[str, float | None]
    path: Path | None = None

    @property
    def completed(self) -> bool:
        """Return whether the training finished."""
        return self.record.status == "completed"

    @property
    def disturbance(self) -> str | None:
        """Return what shows that something else slowed the completed run down; None if nothing does."""
        return describe_disturbance(self.record) if self.completed else None


def row_from_record(record: RunRecord, label: str, path: Path | None = None) -> Row:
    """Return the row of a record. Raise KeyError, TypeError, ValueError or AttributeError if it has invalid content."""
    return Row(label, record, read_settings(record), read_metrics(record), path)


def rows_from_records(records: Sequence[RunRecord], sweep_dir: Path | None = None) -> list[Row]:
    """Return the rows of records in memory, labeled by run number; without a directory they have no path."""
    return [
        row_from_record(record, number := str(record.run.number), sweep_dir and sweep_dir / number / RECORD)
        for record in records
    ]


def load_rows(roots: Sequence[Path]) -> tuple[list[Row], list[str]]:
    """Return a row for each readable record below some directories, and a message for each other one."""
    rows: list[Row] = []
    skipped: list[str] = []
    paths = list(dict.fromkeys(Path(os.path.abspath(path)) for path in find_records(*roots)))
    for path, label in zip(paths, run_labels(paths), strict=True):
        try:
            rows.append(row_from_record(RunRecord.read(path), printable(label), path))
        except (KeyError, TypeError, AttributeError) as error:
            skipped.append(f"{path} is not a record of distexp: {type(error).__name__}: {error}")
        except OSError as error:
            skipped.append(f"{path} cannot be read: {error.strerror}")
        except ValueError as error:
            message = str(error)
            skipped.append(message if str(path) in message else f"{path}: {message}")
    return rows, [printable(message) for message in skipped]


def run_labels(paths: Sequence[Path]) -> list[str]:
    """Return labels such as ``3``, or ``01-35-43/3`` if there are several sweeps."""
    sweeps = [str(path.parent.parent) for path in paths]
    if len(set(sweeps)) < 2:
        return [path.parent.name for path in paths]
    # Each folder has the shortest end that is unique, without a common date.
    folders = sorted(set(sweeps))
    parts = [folder.split("/") for folder in folders]
    deepest = max(map(len, parts))
    count = next(n for n in range(1, deepest + 1) if len({tuple(names[-n:]) for names in parts}) == len(parts))
    ends = ["/".join(names[-count:]) for names in parts]
    same = takewhile(lambda pair: pair[0] == pair[1], zip(min(ends), max(ends), strict=False))
    cut = "".join(first for first, _ in same).rfind("_") + 1
    short = {folder: end[cut:] for folder, end in zip(folders, ends, strict=True)}
    return [f"{short[sweep]}/{path.parent.name}" for sweep, path in zip(sweeps, paths, strict=True)]


def name_runs(labels: Iterable[str], limit: int = 4) -> str:
    """Return ``run 3``, or ``runs 3, 5 and 2 more``."""
    known = list(labels)
    return f"run{'s' if len(known) > 1 else ''} {join_first(known, limit)}"


def format_change(after: float, before: float) -> str:
    """Return the relative change as a percentage with its sign, never ``-0.0%``."""
    return f"{round(100 * (after / before - 1), 1) + 0.0:+.1f}%"


def format_noise(noise: float, reference: float) -> str:
    """Return the noise of a value as ``±4%``; large ones are not exact."""
    percent = 100 * noise / abs(reference) if reference else 0.0
    return f"±{percent:.2g}%" if percent < 99.5 else "more than ±100%"

"""Search for the records of runs below some folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from distexp.runs.record import RunRecord
from distexp.runs.run_dir import RECORD, SNAPSHOT_MARKER


def find_records(*roots: Path) -> Iterator[Path]:
    """Yield the records below some directories, at any depth, in the order of their run numbers."""
    for root in roots:
        found = [Path(where) / RECORD for where, names in _walk(root) if RECORD in names]
        yield from sorted(found, key=_by_number)


def _walk(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield folders and their files, without the snapshots of the code."""
    for where, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not os.path.exists(os.path.join(where, name, SNAPSHOT_MARKER))]
        yield where, names


def _by_number(path: Path) -> tuple[str, int, str]:
    number = path.parent.name
    return str(path.parent.parent), int(number) if number.isdecimal() else -1, number


def load_all(*roots: Path) -> tuple[list[tuple[Path, RunRecord]], list[str]]:
    """Return every readable record with its path, and a message for each that is not readable."""
    records: list[tuple[Path, RunRecord]] = []
    skipped: list[str] = []
    for path in find_records(*roots):
        try:
            records.append((path, RunRecord.read(path)))
        except ValueError as error:
            skipped.append(str(error))
    return records, skipped

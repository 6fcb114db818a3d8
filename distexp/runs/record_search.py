"""Search for the records of runs below some folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from distexp.runs.record import RunRecord
from distexp.runs.run_dir import RECORD, SNAPSHOT_MARKER


class StoredRecord(NamedTuple):
    """A record, and the path of its file."""

    path: Path
    record: RunRecord


class FoundRecords(NamedTuple):
    """The readable records below some folders, and a message for each record that is not readable."""

    stored: list[StoredRecord]
    messages: list[str]

    @property
    def records(self) -> list[RunRecord]:
        """Return the records without their paths."""
        return [found.record for found in self.stored]


def read_records(*roots: Path) -> FoundRecords:
    """Read every record below some directories, in the order of their run numbers."""
    stored: list[StoredRecord] = []
    messages: list[str] = []
    for path in find_records(*roots):
        try:
            stored.append(StoredRecord(path, RunRecord.read(path)))
        except ValueError as error:
            messages.append(str(error))
    return FoundRecords(stored, messages)


def find_records(*roots: Path) -> Iterator[Path]:
    """Yield the records below some directories, at any depth, in the order of their run numbers."""
    for root in roots:
        yield from sorted(_record_paths(root), key=_by_run_number)


def _record_paths(root: Path) -> Iterator[Path]:
    """Yield the records below a folder, without those in snapshots of the code."""
    for folder, subfolders, files in os.walk(root):
        # os.walk enters only the subfolders that are left in this list.
        subfolders[:] = [name for name in subfolders if not os.path.exists(os.path.join(folder, name, SNAPSHOT_MARKER))]
        if RECORD in files:
            yield Path(folder, RECORD)


def _by_run_number(path: Path) -> tuple[str, int, str]:
    """Return the key that sorts the records of a sweep by number, because as texts 10 comes before 9."""
    folder = path.parent
    return str(folder.parent), int(folder.name) if folder.name.isdecimal() else -1, folder.name

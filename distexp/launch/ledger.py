"""``ledger.jsonl`` of a sweep directory: the Slurm job and the latest known state of each run.

Lines are only added, under a lock, and only by commands on a login node. A job writes to its own run directory
only, because lines from several nodes may tear on a network file system.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

from distexp.runs.run_dir import LEDGER
from distexp.system import files, typed_values

JOB = re.compile(r"[0-9]+(_[0-9]+)?")
"""A Slurm job as ARRAY_INDEX. Anything else could be an option of Slurm's commands."""


@dataclass(frozen=True)
class Entry:
    """State of one run at one time."""

    run: int
    id: str
    directory: str  # Directory of the run, relative to the sweep directory, so that the sweep can be moved.
    job: str | None  # Slurm job as ARRAY_INDEX.
    state: str  # ``submitted``, ``cancelled``, or the status of the record.
    unix_time_s: float = field(default_factory=time.time)


def append(sweep_dir: Path, entries: Iterable[Entry]) -> None:
    """Append entries. If the machine goes down, the last line may be torn; ``read`` leaves it out."""
    text = "".join(json.dumps(asdict(entry)) + "\n" for entry in entries)
    if not text:
        return
    with (sweep_dir / LEDGER).open("a+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            text = text if file.read(1) == b"\n" else "\n" + text
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def read(sweep_dir: Path) -> list[Entry]:
    """Read all entries, the oldest first, without those that no distexp writes; a sweep on one machine has none."""
    found = []
    for raw in files.read_entries(sweep_dir / LEDGER):
        try:
            entry = typed_values.parse_dataclass(Entry, raw)
        except (TypeError, ValueError):
            continue
        if _is_valid(sweep_dir, entry):
            found.append(entry)
    return found


def _is_valid(sweep_dir: Path, entry: Entry) -> bool:
    """Return whether an entry names a job of Slurm and a directory inside the sweep."""
    directory = PurePosixPath(entry.directory)
    if directory.is_absolute() or ".." in directory.parts:
        return False
    if entry.job is not None and JOB.fullmatch(entry.job) is None:
        return False
    return (sweep_dir / directory).resolve().is_relative_to(sweep_dir.resolve())


def latest(sweep_dir: Path) -> dict[int, Entry]:
    """Return the latest entry of each run, by its number."""
    return {entry.run: entry for entry in read(sweep_dir)}

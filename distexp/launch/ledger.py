"""``ledger.jsonl`` in a sweep's directory: which job has which run. Lines are only ever added.

Only commands on a login node write it, one line or several at once, under a lock; a job writes in its
run's directory alone, because appending from several nodes may tear on a network's file system.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

FILE = "ledger.jsonl"


@dataclass(frozen=True)
class Entry:
    """One run, and what became of it as far as it was known then."""

    run: int  # its number
    id: str
    directory: str  # relative to the sweep's, so that this holds on another machine too
    job: str | None  # ARRAY_INDEX
    state: str  # submitted, cancelled, or the status of its record
    unix_time_s: float = field(default_factory=time.time)


def append(sweep_dir: Path, entries: Iterable[Entry]) -> None:
    """Adds lines, all of them or, at the worst, a torn last one that ``read`` passes over."""
    text = "".join(json.dumps(asdict(entry)) + "\n" for entry in entries)
    if not text:
        return
    with (sweep_dir / FILE).open("a+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            text = text if file.read(1) == b"\n" else "\n" + text
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def read(sweep_dir: Path) -> list[Entry]:
    """All lines, oldest first; empty for a sweep that ran on one machine."""
    path = sweep_dir / FILE
    if not path.exists():
        return []
    known = {spec.name for spec in fields(Entry)}
    found = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            raw = json.loads(line)
            found.append(Entry(**{key: value for key, value in raw.items() if key in known}))
        except (ValueError, TypeError):
            continue  # the machine went down while it was written
    return found


def latest(sweep_dir: Path) -> dict[int, Entry]:
    """The last word on each run, by number."""
    return {entry.run: entry for entry in read(sweep_dir)}

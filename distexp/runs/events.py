"""``events.jsonl``: the phases of a run and the milestones it passes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from distexp.runs.jsonl import append_line, read_entries
from distexp.runs.run_dir import EVENTS


class Events:
    """The event log of one rank. Only an enabled one writes to disk."""

    def __init__(self, run_dir: Path, *, enabled: bool) -> None:
        self._file = (run_dir / EVENTS).open("w") if enabled else None
        self.phase = "setup"
        self.set_phase("setup")

    def set_phase(self, phase: str, **content: Any) -> None:
        """Mark the start of a phase: preflight, setup, warmup, train, profile, eval, save or done."""
        self.phase = phase
        self.emit(phase=phase, **content)

    def emit(self, **content: Any) -> None:
        """Write one line with the time and some content."""
        if self._file is not None:
            append_line(self._file, {"unix_time_s": time.time(), **content})


def last_value(run_dir: Path, key: str) -> int | None:
    """Return the latest value of a key among the events of a run, or None."""
    found = [entry[key] for entry in read_entries(run_dir / EVENTS) if key in entry]
    return int(found[-1]) if found else None

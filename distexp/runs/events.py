"""``events.jsonl``: the phase that a run is in, and the milestones it passes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, TextIO

from distexp.runs.record import finite

FILE = "events.jsonl"


class Events:
    """Marks of one rank; only a writing one leaves them on disk, each flushed at once."""

    def __init__(self, run_dir: Path, *, enabled: bool) -> None:
        self._file = (run_dir / FILE).open("w") if enabled else None
        self.phase = "setup"
        self.set_phase("setup")

    def set_phase(self, phase: str, **more: Any) -> None:
        """Marks the begin of a phase: setup, warmup, train, profile, eval or save."""
        self.phase = phase
        self.emit(phase=phase, **more)

    def emit(self, **content: Any) -> None:
        """A line with the time and some content."""
        if self._file is not None:
            append_json_line(self._file, {"unix_time_s": time.time(), **content})


def append_json_line(file: TextIO, content: dict[str, Any]) -> None:
    """A line of JSON, flushed, so that a run that dies has told what it did."""
    file.write(json.dumps(finite(content)) + "\n")
    file.flush()


def last_value(run_dir: Path, key: str) -> int | None:
    """A figure that rank 0 left among its events, the last time; None where it left none."""
    try:
        lines = (run_dir / FILE).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        if key in line and line.endswith("}"):  # a rank that was killed may have torn its last line
            return int(json.loads(line)[key])
    return None

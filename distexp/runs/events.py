"""``events.jsonl``: the phases of a run and the milestones it passes; and the progress of each rank."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from distexp.runs.entry_values import number_of
from distexp.runs.jsonl import append_line, read_entries
from distexp.runs.rank_progress import ProgressWriter
from distexp.runs.run_dir import EVENTS


class Events:
    """The events of one rank.

    Args:
        run_dir: Directory of the run.
        enabled: Whether to write the event log, which only rank 0 does.
        progress: Writer of the progress of this rank, or None.
    """

    def __init__(self, run_dir: Path, *, enabled: bool, progress: ProgressWriter | None = None) -> None:
        self._file = (run_dir / EVENTS).open("w") if enabled else None
        self._progress = progress
        self.phase, self.step = "setup", 0
        self.set_phase("setup")

    def set_phase(self, phase: str, **content: Any) -> None:
        """Mark the start of a phase: search, preflight, setup, warmup, train, profile, eval, save or done."""
        self.phase = phase
        self.advance()
        self.emit(phase=phase, **content)

    def advance(self, step: int | None = None) -> None:
        """Count one more point that this rank has passed.

        All ranks must call this at the same points.

        Args:
            step: Finished optimizer steps, if they have changed.
        """
        self.step = self.step if step is None else step
        if self._progress is not None:
            self._progress.advance(self.phase, self.step)

    def emit(self, **content: Any) -> None:
        """Write one line with the time and some content."""
        if self._file is not None:
            append_line(self._file, {"unix_time_s": time.time(), **content})


def last_value(run_dir: Path, key: str) -> int | None:
    """Return the latest value of a key among the events of a run, or None."""
    found = [value for entry in read_entries(run_dir / EVENTS) if (value := number_of(entry, key)) is not None]
    return int(found[-1]) if found else None


def resume_changes(run_dir: Path) -> list[str]:
    """Return the settings that differ from those of the checkpoint that a run resumed from."""
    return [str(change) for entry in read_entries(run_dir / EVENTS) for change in entry.get("changes", ())]

"""Progress of a run, read from the files that it writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distexp.runs.entry_values import number_of
from distexp.runs.heartbeat import last_heartbeat
from distexp.runs.jsonl import read_entries, read_last_entry
from distexp.runs.phases import phase_events_of
from distexp.runs.run_dir import EVENTS, METRICS, OPERATORS, SPEC, memory_trace_paths


@dataclass(frozen=True)
class Progress:
    """The latest phase, step and loss of a run. None if it has not reported one."""

    phase: str | None = None
    step: int | None = None
    steps: int | None = None
    loss: float | None = None

    def __str__(self) -> str:
        if self.step is None:
            return self.phase or "start"
        loss = "nan" if self.loss is None else f"{self.loss:.4f}"
        return f"{self.phase} step {self.step}/{self.steps or '?'}, loss {loss}"


def read_progress(directory: Path) -> Progress:
    """Read the progress of a run from its metrics and events. A file that cannot be read is named as the phase."""
    try:
        return _read_progress(directory)
    except OSError as error:
        return Progress(phase=f"unknown ({error.filename}: {error.strerror})")


def _read_progress(directory: Path) -> Progress:
    events = read_entries(directory / EVENTS)
    phases = phase_events_of(events)
    last_step = read_last_entry(directory / METRICS)
    return Progress(
        phase=phases[-1].phase if phases else _phase_before_workers(directory),
        step=_count_of(last_step, "step"),
        steps=_first_count(events, "total_steps"),
        loss=number_of(last_step, "loss"),
    )


def _phase_before_workers(directory: Path) -> str | None:
    """Return ``compile`` while DeepSpeed's operators are compiled, else None."""
    build = read_last_entry(directory / OPERATORS)
    return "compile" if build and not build.keys() & {"compiled_s", "waited_s"} else None


def _first_count(entries: Iterable[Mapping[str, Any]], key: str) -> int | None:
    """Return the whole number of the first entry that has one."""
    counts = (_count_of(entry, key) for entry in entries)
    return next((count for count in counts if count is not None), None)


def _count_of(entry: Mapping[str, Any], key: str) -> int | None:
    """Return a number of an entry as a whole number; None if the entry has none."""
    number = number_of(entry, key)
    return None if number is None else int(number)


def last_activity(directory: Path) -> float:
    """Return the Unix time in seconds at which a run last wrote a file; 0 if it wrote none."""
    paths = (directory / SPEC, *memory_trace_paths(directory))
    return max([last_heartbeat(directory), *(path.stat().st_mtime for path in paths if path.exists())])

"""Progress of a run, read from the files that it writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from distexp.runs.heartbeat import last_heartbeat
from distexp.runs.jsonl import Entry, number_in, read_entries, read_last_entry
from distexp.runs.phases import read_phase_events
from distexp.runs.run_dir import EVENTS, METRICS, OPERATORS, SPEC, memory_traces


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
    events = read_phase_events(directory / EVENTS)
    last = read_last_entry(directory / METRICS)
    return Progress(
        phase=events[-1].phase if events else _phase_before_workers(directory),
        step=_whole(number_in(last, "step")),
        steps=_total_steps(read_entries(directory / EVENTS)),
        loss=number_in(last, "loss"),
    )


def _phase_before_workers(directory: Path) -> str | None:
    """Return ``compile`` while DeepSpeed's operators are compiled, else None."""
    build = read_last_entry(directory / OPERATORS)
    return "compile" if build and "compiled_s" not in build else None


def last_activity(directory: Path) -> float:
    """Return the Unix time in seconds at which a run last wrote a file; 0 if it wrote none."""
    paths = (directory / SPEC, *(path for _, path in memory_traces(directory)))
    return max([last_heartbeat(directory), *(path.stat().st_mtime for path in paths if path.exists())])


def _total_steps(events: list[Entry]) -> int | None:
    found = (_whole(number_in(event, "total_steps")) for event in events)
    return next((steps for steps in found if steps is not None), None)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)

"""``events.jsonl``: the phases of a run and the milestones it passes; and the progress of each rank."""

import json
import math
import os
import time
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distexp.runs.run_dir import EVENTS, RANK_PROGRESS
from distexp.system.files import Entry, Tail, append_line, read_entries
from distexp.system.typed_values import number_of


class ProgressWriter:
    """Writer of the progress of one rank, so that a hang can name the rank that the others wait for.

    All ranks pass the same points of the program in the same order: phases, batches and steps. Each rank counts the
    points that it has passed, in a small file that it overwrites in place. The rank with the lowest count is behind.
    """

    def __init__(self, run_dir: Path, node: int, rank: int) -> None:
        self._rank, self._pid, self._count = rank, os.getpid(), 0
        self._file = os.open(RANK_PROGRESS.path(run_dir, node, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def advance(self, phase: str, step: int) -> None:
        """Write that the rank has passed a point."""
        self._count += 1
        progress = {"rank": self._rank, "pid": self._pid, "count": self._count, "phase": phase, "step": step}
        # The size of the file never changes, so that a full disk does not end the training here.
        os.pwrite(self._file, json.dumps(progress).ljust(256).encode(), 0)


class Events:
    """The events of one rank."""

    def __init__(self, run_dir: Path, *, enabled: bool, progress: ProgressWriter | None = None) -> None:
        self._file = (run_dir / EVENTS).open("w") if enabled else None
        self._progress = progress
        self.phase, self.step = "setup", 0
        self.set_phase("setup")

    def set_phase(self, phase: str, **content: Any) -> None:
        """Mark the start of a phase: compiling, search, preflight, setup, warmup, train, profile, eval, save, done."""
        self.phase = phase
        self.advance()
        self.emit(phase=phase, **content)

    def advance(self, step: int | None = None) -> None:
        """Count one more point that this rank has passed. All ranks must call this at the same points."""
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


@dataclass(frozen=True, order=True)
class PhaseEvent:
    """The start of a phase."""

    unix_time_s: float
    phase: str


class TimeInterval(NamedTuple):
    """A time from its start up to its end, both in Unix seconds."""

    start_s: float
    end_s: float


class PhaseTail:
    """Current phase of a run. It reads only what was added to the file since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tail = Tail(path)
        self._restarts = 0
        self._events: list[PhaseEvent] = []

    def at(self, unix_time_s: float) -> str:
        """Return the phase at a time, as far as it is on disk; empty before the first event. Raise OSError."""
        new = self._tail.read_entries()
        if self._tail.restarts > self._restarts:
            self._restarts, self._events = self._tail.restarts, []
        self._events = sorted([*self._events, *phase_events_of(new)])
        return phase_at(self._events, unix_time_s)


def read_phase_events(path: Path) -> list[PhaseEvent]:
    """Read the phase events of a file in the order of time, or raise OSError; a missing file has none."""
    return phase_events_of(read_entries(path))


def phase_events_of(entries: Iterable[Entry]) -> list[PhaseEvent]:
    """Return the entries that start a phase, in the order of time. Other entries report something else."""
    found = []
    for entry in entries:
        with suppress(ValueError, KeyError, TypeError):
            found.append(PhaseEvent(float(entry["unix_time_s"]), str(entry["phase"])))
    return sorted(found)


def phase_at(events: Sequence[PhaseEvent], unix_time_s: float) -> str:
    """Return the phase at a time; empty before the first event."""
    position = bisect_right(events, unix_time_s, key=lambda event: event.unix_time_s)
    return events[position - 1].phase if position else ""


def phase_intervals(events: Sequence[PhaseEvent], phases: Collection[str]) -> list[TimeInterval]:
    """Return the intervals in which a run was in one of some phases. The last one may end at infinity."""
    ends = [*(event.unix_time_s for event in events[1:]), math.inf]
    starts = zip(events, ends, strict=False)
    return [TimeInterval(event.unix_time_s, end) for event, end in starts if event.phase in phases]


@dataclass(frozen=True)
class RankProgress:
    """The last point that a rank has passed."""

    rank: int
    pid: int
    count: int  # points passed so far
    phase: str
    step: int

    def __str__(self) -> str:
        after = f" after step {self.step}" if self.step else ""
        return f"rank {self.rank} in phase {self.phase}{after}"


def read_rank_progress(run_dir: Path, node: int | str = "*") -> list[RankProgress]:
    """Read the progress of all ranks, or of those of a node; ranks that have not started are left out."""
    found = []
    for path in RANK_PROGRESS.find(run_dir, node):
        with suppress(ValueError, TypeError):  # The rank was killed before its first line.
            found.append(RankProgress(**json.loads(path.read_text())))
    return sorted(found, key=lambda progress: progress.rank)


def ranks_behind(progress: list[RankProgress]) -> list[RankProgress]:
    """Return the ranks with the lowest count; none if all ranks have the same count."""
    counts = {rank.count for rank in progress}
    return [rank for rank in progress if rank.count == min(counts)] if len(counts) > 1 else []

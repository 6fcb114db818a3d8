"""Phases of a run over time, as rank 0 writes them to ``events.jsonl``."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from distexp.runs.jsonl import Entry, Tail, read_entries


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
        """Return the phase at a time, as far as it is on disk; empty before the first event.

        Raises:
            OSError: if the file exists and cannot be read.
        """
        new = self._tail.read_entries()
        if self._tail.restarts > self._restarts:
            self._restarts, self._events = self._tail.restarts, []
        self._events = sorted([*self._events, *phase_events_of(new)])
        return phase_at(self._events, unix_time_s)


def read_phase_events(path: Path) -> list[PhaseEvent]:
    """Read the phase events of a file in the order of time; a missing file has none.

    Raises:
        OSError: if the file exists and cannot be read.
    """
    return phase_events_of(read_entries(path))


def phase_events_of(entries: Iterable[Entry]) -> list[PhaseEvent]:
    """Return the entries that start a phase, in the order of time. Other entries report something else."""
    found = []
    for entry in entries:
        try:
            found.append(PhaseEvent(float(entry["unix_time_s"]), str(entry["phase"])))
        except (ValueError, KeyError, TypeError):
            continue
    return sorted(found)


def phase_at(events: Sequence[PhaseEvent], unix_time_s: float) -> str:
    """Return the phase at a time; empty before the first event."""
    position = bisect_right(events, unix_time_s, key=lambda event: event.unix_time_s)
    return events[position - 1].phase if position else ""


def phase_intervals(events: Sequence[PhaseEvent], phases: Collection[str]) -> list[TimeInterval]:
    """Return the intervals in which a run was in one of some phases. The last one may end at infinity."""
    ends = [event.unix_time_s for event in events[1:]] + [math.inf]
    return [
        TimeInterval(event.unix_time_s, end) for event, end in zip(events, ends, strict=False) if event.phase in phases
    ]

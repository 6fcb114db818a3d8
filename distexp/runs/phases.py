"""Which phase a run was in at a given time, from the marks that rank 0 leaves in ``events.jsonl``."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class PhaseEvent:
    """The begin of a phase."""

    unix_time_s: float
    phase: str


class PhaseTail:
    """The phase of a run that is going on: reads only what was added to the file since the last time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._marks: list[PhaseEvent] = []

    def at(self, unix_time_s: float) -> str:
        """The phase at a time, as far as the marks on disk tell; empty before the first.

        Raises OSError where the file is there and cannot be read.
        """
        self._read_on()
        return phase_at(self._marks, unix_time_s)

    def _read_on(self) -> None:
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._offset:  # a later attempt has begun the file anew
                    self._offset, self._marks = 0, []
                if size == self._offset:
                    return
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return
        self._offset += len(whole) + 1 if whole else 0
        self._marks = sorted([*self._marks, *_marks(whole.decode(errors="replace").splitlines())])


def read_phase_events(path: Path) -> list[PhaseEvent]:
    """All marks of a file, in order of time; none where there is no file. Raises OSError."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return sorted(_marks(lines))


def _marks(lines: Iterable[str]) -> list[PhaseEvent]:
    """The lines that begin a phase; others tell something else, and the last may be torn."""
    found = []
    for line in lines:
        try:
            event = json.loads(line)
            found.append(PhaseEvent(float(event["unix_time_s"]), str(event["phase"])))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def phase_at(marks: Sequence[PhaseEvent], unix_time_s: float) -> str:
    """The phase that the last mark up to a time began; empty before the first."""
    position = bisect_right(marks, unix_time_s, key=lambda mark: mark.unix_time_s)
    return marks[position - 1].phase if position else ""


def phase_intervals(marks: Sequence[PhaseEvent], phases: Collection[str]) -> list[tuple[float, float]]:
    """The stretches (begin, end; unix seconds) of a run in some phases; an open one ends at infinity."""
    ends = [mark.unix_time_s for mark in marks[1:]] + [math.inf]
    return [(mark.unix_time_s, end) for mark, end in zip(marks, ends, strict=False) if mark.phase in phases]

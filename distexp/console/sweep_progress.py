"""Progress of a sweep: how many cells are done, and how long the others will take."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

from distexp.runs.record import RunRecord
from distexp.system.units import format_about

MIN_SPREAD = 1.5
"""Longest over shortest duration from which both are printed."""


@dataclass
class SweepProgress:
    """Progress of a sweep on this machine.

    Attributes:
        cells: Number of cells.
        runs: Number of cells that train; the others are invalid.
        ended: Number of cells that have ended.
        durations: Status and seconds of each run of this command, with the start of its processes.
    """

    cells: int
    runs: int
    ended: int = 0
    durations: list[tuple[str, float]] = field(default_factory=list)
    ended_runs: int = 0
    started: float | None = None

    def start(self) -> None:
        """Note the time at which a cell starts."""
        self.started = time.monotonic()

    def add(self, record: RunRecord) -> None:
        """Count a cell that has ended, or was done before."""
        self.ended += 1
        if record.status == "invalid":
            return
        self.ended_runs += 1
        if self.started is not None:
            self.durations.append((record.status, time.monotonic() - self.started))

    def line(self) -> str | None:
        """Return ``2 of 8 done, about 50 s left``; None for a single run and at the end."""
        left = self.runs - self.ended_runs
        if self.cells == 1 or left <= 0:
            return None
        return f"{self.ended} of {self.cells} done, {self._time_left(left)}"

    def _time_left(self, runs: int) -> str:
        """Return the time of the remaining runs, if they are like the median of the earlier ones.

        A run that failed may have ended early, so it counts only if no run completed.
        """
        known = [seconds for status, seconds in self.durations if status == "completed"]
        known = known or [seconds for _, seconds in self.durations]
        if not known:
            return "time left unknown until a run has ended"
        shortest, longest = min(known), max(known)
        spread = f" (runs took {shortest:,.0f} to {longest:,.0f} s)" if longest > MIN_SPREAD * shortest else ""
        return f"about {format_about(runs * statistics.median_low(known))} left{spread}"

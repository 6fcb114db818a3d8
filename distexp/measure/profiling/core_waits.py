"""Time in the profiled steps of a CPU in which other programs had the core of the training thread."""

from __future__ import annotations

from distexp.measure.scheduler_delay import SchedulerDelay


class CoreWaits:
    """Time without a core in each profiled step. It is that of the training thread, so other threads may wait longer.

    Args:
        enabled: Whether to measure. On a GPU the time of the CPU is no part of a step.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._scheduler = SchedulerDelay() if enabled else None
        self._started_s = 0.0
        self._waits_s: list[float] = []

    def start_step(self) -> None:
        """Start to measure a step."""
        if self._scheduler is not None:
            self._started_s = self._scheduler.read_s()

    def end_step(self) -> None:
        """Keep the time of the step that has ended."""
        if self._scheduler is not None:
            self._waits_s.append(self._scheduler.read_s() - self._started_s)

    def milliseconds(self, position: int) -> float | None:
        """Return the time of a profiled step by its number; None if it is not known."""
        if self._scheduler is None or not self._scheduler.is_readable or position >= len(self._waits_s):
            return None
        return 1000 * self._waits_s[position]

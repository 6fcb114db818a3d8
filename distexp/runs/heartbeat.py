"""Heartbeat of a run: rank 0 touches a file after each step, and the agents check its age."""

from __future__ import annotations

import time
from pathlib import Path

from distexp.runs.run_dir import EVENTS, HEARTBEAT, OPERATORS

MIN_INTERVAL_S = 1.0
"""Shortest time between two touches. On a network file system each touch is a message to the server."""


class Heartbeat:
    """Writer of ``run_dir/heartbeat``. It touches the file at most once a second."""

    def __init__(self, run_dir: Path, *, enabled: bool) -> None:
        self.path = run_dir / HEARTBEAT if enabled else None
        self._last_touch_s = 0.0

    def beat(self) -> None:
        """Record that a step is done."""
        now = time.monotonic()
        if self.path is not None and now - self._last_touch_s >= MIN_INTERVAL_S:
            self.path.touch()
            self._last_touch_s = now


def record_progress(run_dir: Path) -> None:
    """Record progress of a process that does not train, as the search of a micro-batch."""
    (run_dir / EVENTS).touch()


def last_heartbeat(run_dir: Path) -> float:
    """Return the Unix time in seconds of the last step, event or build step; 0 before the first."""
    return max(_modified(run_dir / name) for name in (HEARTBEAT, EVENTS, OPERATORS))


def last_build_step(run_dir: Path) -> float:
    """Return the Unix time in seconds at which the build of operators last reported; 0 if there was none."""
    return _modified(run_dir / OPERATORS)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0

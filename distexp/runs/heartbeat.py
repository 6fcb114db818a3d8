"""A sign of life: rank 0 touches a file while steps go on, and the agents look at its age."""

from __future__ import annotations

import time
from pathlib import Path

from distexp.runs.events import FILE as EVENTS

FILE = "heartbeat"
EVERY_S = 1.0  # no oftener: on a cluster's file system each touch is a message


class Heartbeat:
    """Touches ``run_dir/heartbeat`` at most once a second."""

    def __init__(self, run_dir: Path, *, enabled: bool) -> None:
        self.path = run_dir / FILE if enabled else None
        self.last = 0.0

    def beat(self) -> None:
        """A step is done."""
        now = time.monotonic()
        if self.path is not None and now - self.last >= EVERY_S:
            self.path.touch()
            self.last = now


def last_heartbeat(run_dir: Path) -> float:
    """Unix time in seconds of the last step or the last phase mark; 0 before any."""
    return max((_modified(run_dir / name) for name in (FILE, EVENTS)), default=0.0)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0

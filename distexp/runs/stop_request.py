"""Graceful-stop requests: a file in the run directory that rank 0 polls.

A file works for workers that are still starting, and for all nodes. The command and its agents write it when they
get SIGUSR1 or SIGUSR2. A worker's own SIGUSR1 prints its stacks. SIGTERM ends a run at once.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

from distexp.runs.json_files import write_json
from distexp.runs.run_dir import STOP_REQUEST

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a command or an agent to stop its run after a checkpoint."""

POLL_S = 1.0
"""Shortest time between two polls. On a network file system each poll is a message to the server."""


def request_stop(run_dir: Path, reason: str) -> None:
    """Ask the workers of a run to write a checkpoint after their current step, and to end.

    Args:
        run_dir: Directory of the run.
        reason: ``time_limit``, ``preemption``, or the name of a signal.
    """
    write_json(run_dir / STOP_REQUEST, {"unix_time_s": time.time(), "reason": reason})


def read_reason(run_dir: Path) -> str | None:
    """Return why a run was asked to stop, or None if it was not."""
    request = _read(run_dir)
    return None if request is None else str(request["reason"])


class StopRequest:
    """Poller of the stop request, at most once a second. A disabled one never polls.

    A new attempt archives or deletes the request for an earlier one. So the file may be older than this process, for
    example if it was written while operators were built.
    """

    def __init__(self, run_dir: Path, *, enabled: bool) -> None:
        self.run_dir = run_dir
        self.enabled = enabled
        self.received = False
        self._next_poll_s = 0.0

    def __call__(self) -> bool:
        """Return whether a stop was requested; once true, it stays true."""
        if self.enabled and not self.received and time.monotonic() >= self._next_poll_s:
            self._next_poll_s = time.monotonic() + POLL_S
            self.received = _read(self.run_dir) is not None
        return self.received

    def reason(self) -> str:
        """Return why the run was asked to stop."""
        return read_reason(self.run_dir) or "unknown"


def _read(run_dir: Path) -> dict[str, Any] | None:
    try:
        request: dict[str, Any] = json.loads((run_dir / STOP_REQUEST).read_text())
    except FileNotFoundError:
        return None
    return request

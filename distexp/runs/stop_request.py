"""Word that a run will have to end soon: it is left in the run directory, and rank 0 looks for it.

A file, and not a signal, tells the workers: it waits for those that are still starting, and serves all
nodes. The command and its agents take SIGUSR1 or SIGUSR2 for such a word (a worker's SIGUSR1 asks for its
stacks); SIGTERM still ends a run at once.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from distexp.runs.record import write_json

FILE = "notice.json"
"""{unix_time_s, reason: time_limit, preemption, or the name of a signal}."""

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""By which a command or a node is told that its machine will be taken away soon."""

LOOK_S = 1.0  # no oftener: on a cluster's file system each look is a message
CLOCK_S = 2.0  # by which the kernel's account of a process' start may be off


def request_stop(run_dir: Path, reason: str) -> None:
    """Asks the workers of a run to write a checkpoint after their current step, and to end."""
    write_json(run_dir / FILE, {"unix_time_s": time.time(), "reason": reason})


class StopRequest:
    """Rank 0's look at the run directory, at most once a second; other ranks see nothing.

    What was left before this worker's torchrun started was meant for an earlier attempt.
    """

    def __init__(self, run_dir: Path, *, enabled: bool) -> None:
        self.path = run_dir / FILE
        parent = psutil.Process().parent() if enabled else None
        self.since = parent.create_time() - CLOCK_S if parent else 0.0
        self.looked = float("-inf") if enabled else float("inf")
        self.given = False

    def __call__(self) -> bool:
        """Whether word has come; stays so."""
        now = time.monotonic()
        if not self.given and now - self.looked >= LOOK_S:
            self.looked = now
            told = self._read()
            self.given = told is not None and float(told["unix_time_s"]) >= self.since
        return self.given

    def reason(self) -> str:
        """Why the run has to end."""
        told = self._read()
        return str(told["reason"]) if told else "unknown"

    def _read(self) -> dict[str, Any] | None:
        try:
            told: dict[str, Any] = json.loads(self.path.read_text())
        except FileNotFoundError:
            return None
        return told

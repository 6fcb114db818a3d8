"""Exceptions that end a command without being bugs, and the exit code of a closed pipe."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable


class SweepFailedError(Exception):
    """A finished sweep with a failed run. The command exits with code 1."""


class InterruptedRunError(BaseException):
    """Ctrl-C, SIGTERM, SIGUSR1 or SIGUSR2 during a run. The record is written, and no other run is started."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")


class SweepInterrupted(BaseException):
    """Ctrl-C before the runs of a sweep were started. The message reports what was done."""


class MonitoringInterrupted(BaseException):
    """Ctrl-C while jobs were monitored. The jobs continue."""


def run_until_pipe_closes(command: Callable[[], int]) -> int:
    """Run a command and return its exit code: 141 if stdout was closed (as by ``head``), 130 after Ctrl-C."""
    try:
        code = command()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would report another BrokenPipeError when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("distexp: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return code

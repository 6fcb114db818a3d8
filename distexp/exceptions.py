"""The ways in which a command ends that are no error of the program."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable


class SweepFailedError(Exception):
    """Some run of a finished sweep failed; the command ends with code 1."""


class InterruptedRunError(BaseException):
    """Ctrl-C, SIGTERM, or a notice by SIGUSR1: the run is ended and recorded, and no further one starts."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")


class MonitoringInterrupted(BaseException):
    """Ctrl-C while jobs were watched, which go on."""


def run_until_pipe_closes(command: Callable[[], int]) -> int:
    """The exit code of a command that prints; the shell's for SIGPIPE where its reader, as ``head``, had enough."""
    try:
        code = command()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more at its end
        return 128 + signal.SIGPIPE
    return code

"""The ways in which a command ends that are no fault of the program."""

from __future__ import annotations

import signal


class SweepFailedError(Exception):
    """Some run of a finished sweep failed; the command ends with code 1."""


class InterruptedRunError(BaseException):
    """Ctrl-C or SIGTERM: the run is ended and recorded, and no further one starts."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")


class WatcherLeftError(BaseException):
    """Ctrl-C while jobs were watched, which go on."""

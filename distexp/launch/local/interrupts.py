"""Signals that a local run gets from its user: what they do at each stage of the run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from distexp.exceptions import InterruptedRunError
from distexp.runs import stop_request
from distexp.system.signals import handle_signals


@contextmanager
def interrupts_raised() -> Iterator[None]:
    """Raise InterruptedRunError on Ctrl-C and SIGTERM inside the block."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise InterruptedRunError(number)

    with handle_signals(stop, signal.SIGINT, signal.SIGTERM):
        yield


@contextmanager
def stop_signals_forwarded(directory: Path) -> Iterator[list[int]]:
    """Request a stop after a checkpoint on SIGUSR1 and SIGUSR2; yield the list of signals received."""
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        stop_request.request_stop(directory, signal.Signals(number).name)

    with handle_signals(forward, *stop_request.SIGNALS):
        yield received


@contextmanager
def interrupts_collected() -> Iterator[list[int]]:
    """Yield the list of Ctrl-C and SIGTERM inside the block, which do not stop it: the record is written completely."""
    received: list[int] = []
    with handle_signals(lambda number, _: received.append(number), signal.SIGINT, signal.SIGTERM):
        yield received

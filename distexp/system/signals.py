"""Signal handlers that last for a block."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], None] | signal.Handlers


@contextmanager
def handle_signals(handler: Handler, *numbers: signal.Signals) -> Iterator[None]:
    """Use a handler for some signals until the block ends."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM take effect at the end of the block."""
    received: list[int] = []
    with handle_signals(lambda number, _: received.append(number), signal.SIGINT, signal.SIGTERM):
        yield
    for number in received[:1]:
        signal.raise_signal(number)

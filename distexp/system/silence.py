"""A line that shows on a terminal what a command does while it prints nothing, and whether a terminal gets such lines.

The line disappears before the next output. Without a terminal, nothing changes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

SILENT_S = 2.0
"""Time without output after which the line appears."""

LOCK_S = 0.2
"""Longest wait for the lock. A forked process, or a handler of a signal, may never get it."""

ERASE = b"\r\x1b[2K"


def allows_live_lines(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the user wants lines that are overwritten: not with NO_COLOR, or on a terminal without them."""
    return not environment.get("NO_COLOR") and environment.get("TERM", "") not in ("", "dumb", "unknown")


class _Line:
    """The line: what the command does, since when, when it printed for the last time, and whether the line is shown."""

    def __init__(self) -> None:
        self.text, self.started, self.printed = "", 0.0, 0.0
        self.is_shown, self.is_inside_line = False, False
        self.lock = threading.Lock()

    def show(self, silent_s: float) -> None:
        """Show or update the line, unless something was printed lately, or the cursor is inside of a line."""
        with self.lock, suppress(OSError, ValueError):
            now, screen = time.monotonic(), sys.__stderr__
            if screen is None or self.is_inside_line or now - self.printed < silent_s:
                return
            if os.isatty(screen.fileno()):  # It is a file since the terminal was closed.
                width = os.get_terminal_size(screen.fileno()).columns
                text = f"{self.text}, {now - self.started:,.0f} s"
                self.is_shown = True
                os.write(screen.fileno(), ERASE + text[: max(1, width - 1)].encode())

    def erase(self) -> None:
        """Remove the line, if it is shown."""
        if self.is_shown and sys.__stderr__ is not None:
            self.is_shown = False
            with suppress(OSError, ValueError):
                os.write(sys.__stderr__.fileno(), ERASE)


_line = _Line()


def set_step(text: str) -> None:
    """Set what the command does now, for example ``composing 8 runs``."""
    _line.text, _line.started = text, time.monotonic()


@contextmanager
def announced(text: str, silent_s: float = SILENT_S) -> Iterator[None]:
    """Show what the command does, with its duration, whenever it prints nothing for a while, until the block ends.

    Nothing happens unless both outputs are terminals. While rich shows a live display, no line is added.
    """
    set_step(text)
    streams = sys.stdout, sys.stderr
    if not (allows_live_lines() and all(stream is not None and stream.isatty() for stream in streams)):
        yield
        return
    _line.printed = time.monotonic()
    output, errors = (cast(TextIO, _Noticed(stream)) for stream in streams)
    end = threading.Event()

    def watch() -> None:
        while not end.wait(silent_s / 4):
            if sys.stdout is output:  # rich replaces it
                _line.show(silent_s)

    sys.stdout, sys.stderr = output, errors
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        _line.erase()
        sys.stdout, sys.stderr = streams


class _Noticed:
    """A stream that removes the line before it writes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text after the line has disappeared."""
        is_locked = _line.lock.acquire(timeout=LOCK_S)
        try:
            _line.erase()
            _line.printed = time.monotonic()
            _line.is_inside_line = _line.is_inside_line if not text else not text.endswith("\n")
            return self._stream.write(text)
        finally:
            if is_locked:
                _line.lock.release()

    def writelines(self, lines: Iterable[str]) -> None:
        """Write some texts."""
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

"""Time that a thread waits for a core, from the statistics of the Linux scheduler."""

from __future__ import annotations

import os
import weakref
from functools import cache

SCHEDSTAT = "/proc/thread-self/schedstat"
"""Statistics of the scheduler about the thread that opens the file."""


class SchedulerDelay:
    """Time that a thread was ready to run without a core. It is that of the thread of the first reading.

    Other programs cause it, so on a CPU it is not part of the own time. The file stays open: it is read twice in each
    wait.
    """

    def __init__(self, path: str = SCHEDSTAT) -> None:
        self._path = path
        self._file: int | None = None
        self._delay_s = 0.0
        self.is_readable = True  # false once a reading failed

    def read_s(self) -> float:
        """Return the seconds so far; 0 if the kernel does not count them, which is printed once."""
        if self.is_readable:
            try:
                self._delay_s = self._read_ns() / 1e9
            except (OSError, ValueError) as error:
                self.is_readable = False
                _print_once(
                    f"note: {self._path} has no times ({error}), so the own time of this rank contains the time in "
                    "which other programs have its core"
                )
        return self._delay_s

    def _read_ns(self) -> int:
        if self._file is None:
            self._file = os.open(self._path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
        content = os.pread(self._file, 128, 0)
        times = [
            int(number) for number in content.split()
        ]  # on a core, ready without a core (both ns), times on a core
        if len(times) != 3 or not any(times):  # A kernel without these statistics writes zeros.
            raise ValueError(f"content {content!r}")
        return times[1]


@cache
def _print_once(text: str) -> None:
    print(text, flush=True)

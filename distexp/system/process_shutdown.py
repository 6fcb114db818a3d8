"""End of a child process with all its descendants, which it would leave behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import psutil

KILL_S = 10.0
"""Longest time to wait for the end of a killed process. One that waits for a file system may take forever."""

POLL_S = 0.05
"""Time between two checks whether processes have ended."""


def descendants(pid: int, *, recursive: bool = True) -> list[psutil.Process]:
    """Return the descendants of a process, or only its children; empty if it does not exist."""
    try:
        return psutil.Process(pid).children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


class WatchedProcess(Protocol):
    """A process that this one has started, or had started. It has these methods of a ``Popen``."""

    @property
    def pid(self) -> int:
        """Return its id, which no other process gets before its end is known here."""

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""

    def wait(self) -> int:
        """Wait for the end and return the exit code."""

    def send_signal(self, number: int, /) -> None:
        """Send a signal if the process runs."""

    def kill(self) -> None:
        """Send SIGKILL if the process runs."""


def end_tree(process: WatchedProcess, grace_s: float) -> None:
    """End a child process and all its descendants, and wait for their end.

    Args:
        process: The child.
        grace_s: Seconds between SIGTERM for the child and SIGKILL for every process that is left.
    """
    family = _terminate(process, grace_s)
    left = [member for member in family if _is_alive(member)]
    for member in left:
        with suppress(psutil.NoSuchProcess):  # It may have ended by itself meanwhile.
            member.kill()
    if process.poll() is None:
        process.kill()
    process.wait()
    _wait_until(lambda: not any(map(_is_alive, left)), KILL_S)


def _terminate(process: WatchedProcess, grace_s: float) -> list[psutil.Process]:
    """Send SIGTERM to a child process, give its tree some seconds to end, and return all its descendants."""
    family: dict[int, psutil.Process] = {}

    def find_family() -> None:
        family.update((member.pid, member) for member in descendants(process.pid))

    def has_ended() -> bool:
        find_family()
        return process.poll() is not None and not any(map(_is_alive, family.values()))

    find_family()  # The descendants of a child that has ended cannot be found.
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    _wait_until(has_ended, grace_s)
    return list(family.values())


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Wait for a condition, at most some seconds."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not condition():
        time.sleep(POLL_S)


def kill_tree(pid: int) -> None:
    """Kill a child process and all its descendants. It waits for none of them."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)  # It starts no further process.
    for member in descendants(pid):
        with suppress(psutil.NoSuchProcess):
            member.kill()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

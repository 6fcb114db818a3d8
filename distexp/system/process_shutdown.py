"""End of a child process with all its descendants, which it would leave behind."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Protocol

import psutil

KILL_S = 10.0
"""Longest time to wait for the end of a killed process. One that waits for a file system may take forever."""


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
    family = {member.pid: member for member in descendants(process.pid)}
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and (process.poll() is None or any(map(_is_alive, family.values()))):
        family |= {member.pid: member for member in descendants(process.pid)}
        time.sleep(0.05)
    left = [member for member in family.values() if _is_alive(member)]
    for member in left:
        with suppress(psutil.NoSuchProcess):  # It may have ended by itself meanwhile.
            member.kill()
    if process.poll() is None:
        process.kill()
    process.wait()
    deadline = time.monotonic() + KILL_S
    while any(map(_is_alive, left)) and time.monotonic() < deadline:
        time.sleep(0.05)


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

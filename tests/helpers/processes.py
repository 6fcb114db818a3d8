"""Processes of this machine, any of which may end while it is looked at."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs. A zombie has ended, and not every init process reaps it."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def have_ended(processes: Iterable[psutil.Process]) -> bool:
    """Return whether none of the processes runs."""
    return not any(map(is_alive, processes))


def find_processes(*texts: str) -> list[psutil.Process]:
    """Return the processes of this machine whose command lines contain all texts.

    Each has its command line as ``info["cmdline"]``.
    """
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if all(any(text in argument for argument in process.info["cmdline"] or []) for text in texts)
    ]

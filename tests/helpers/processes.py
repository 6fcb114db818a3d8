"""Processes of this machine, any of which may end while it is looked at."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

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
    """Return the processes of this machine whose command lines, or working directories, contain all texts.

    Forks have the command line of their server, and the directory of the command that starts them. Each process has its
    command line as ``info["cmdline"]``.
    """
    return [process for process in psutil.process_iter(["cmdline", "cwd", "ppid"]) if _has(process, texts)]


def _has(process: psutil.Process, texts: Sequence[str]) -> bool:
    arguments = process.info["cmdline"] or []
    is_server = process.info["ppid"] == os.getpid() and any("multiprocessing" in each for each in arguments)
    if is_server or process.pid == os.getpid():
        return False
    return all(any(text in each for each in (*arguments, process.info["cwd"] or "")) for text in texts)

"""Lock of a run directory, so that two commands never run the same run at the same time."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distexp.runs.run_dir import LOCK


@contextmanager
def run_lock(directory: Path) -> Iterator[str | None]:
    """Hold the lock of a run directory during the block.

    The system frees it if this process dies. File systems without locks are used without.

    Yields:
        None, or which process has the lock.
    """
    path = directory / LOCK
    descriptor = _open_locked(path)
    if descriptor is None:
        yield _read_owner(path) or "another process"
        return
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield None
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _read_owner(path: Path) -> str:
    """Return which process has a lock; empty if it has not written it yet, or has just removed the file."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _open_locked(path: Path) -> int | None:
    """Open and lock a file; None if another process has the lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            return descriptor  # the file system has no locks
        if _is_file_at(path, descriptor):
            return descriptor
        os.close(descriptor)  # The process that had the lock has removed the file.


def _is_file_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False

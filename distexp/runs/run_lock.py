"""Locks of runs and sweeps, so that two commands never write to the same directory at the same time."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distexp.config import ConfigError
from distexp.runs.command_text import suggest_command
from distexp.runs.run_dir import LOCK, SWEEP_LOCK


@contextmanager
def run_lock(directory: Path) -> Iterator[str | None]:
    """Hold the lock of a run directory during the block.

    The system frees it if this process dies. File systems without locks are used without.

    Yields:
        None, or which process has the lock.
    """
    with _locked(directory / LOCK) as owner:
        yield owner


@contextmanager
def sweep_lock(sweep_dir: Path) -> Iterator[None]:
    """Hold the lock of a sweep directory during the block.

    Raises:
        ConfigError: if another command holds it.
    """
    with _locked(sweep_dir / SWEEP_LOCK) as owner:
        if owner is not None:
            raise ConfigError(
                f"{owner} runs the sweep in {sweep_dir}: follow it with '{suggest_command('status', sweep_dir)} "
                f"--watch', end it with '{suggest_command('cancel', sweep_dir)}', or choose another directory with "
                "hydra.sweep.dir=DIR"
            )
        yield


@contextmanager
def _locked(path: Path) -> Iterator[str | None]:
    """Hold a lock file during the block; yield None, or the process that holds it."""
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

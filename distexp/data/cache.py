"""Cache of generated samples, trained tokenizers and tokenized texts."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import IO

from distexp.config import ConfigError
from distexp.runs.files import remove


def cache_dir() -> Path:
    """Return the cache directory.

    ``$DISTEXP_CACHE``, or ``$XDG_CACHE_HOME/distexp``, or ``~/.cache/distexp``.

    Raises:
        ConfigError: the user has no home directory, as in some containers.
    """
    configured = os.environ.get("DISTEXP_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(configured).expanduser().absolute() if configured else Path(base, "distexp").expanduser().absolute()
    except RuntimeError:
        raise ConfigError(
            "this user has no home directory for the cache: set the environment variable DISTEXP_CACHE to a writable "
            "directory"
        ) from None


def build_once(path: Path, build: Callable[[Path], None]) -> Path:
    """Build a file or folder in one process while other processes wait for it.

    Args:
        path: result of the build. An existing result is never built again, so the name must contain a
            format version and identify the inputs.
        build: writes the file or folder to the path it gets. That is a temporary sibling of ``path``,
            renamed when complete, so a killed process never leaves a partial result.

    Returns:
        ``path``, which exists now.

    Raises:
        ConfigError: the cache directory is not writable.
    """
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = (path.parent / f".{path.name}.lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"cannot write to the cache directory {path.parent} ({error.strerror}): "
            "set the environment variable DISTEXP_CACHE to a writable directory"
        ) from error
    with lock:
        locked = _acquire(lock)
        if not path.exists():
            _build_and_rename(path, build, locked=locked)
    return path


def _acquire(lock: IO[str]) -> bool:
    """Wait for a lock and return True; return False if the file system has no locks.

    The kernel releases the lock if its process dies.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _build_and_rename(path: Path, build: Callable[[Path], None], *, locked: bool) -> None:
    prefix = f".{path.name}.{socket.gethostname()}"
    if locked:
        # Only remove files of this host: on some network file systems, locks do not exclude other hosts.
        for abandoned in path.parent.glob(f"{prefix}-*.partial"):
            remove(abandoned)
    partial = path.parent / f"{prefix}-{os.getpid()}.partial"
    try:
        build(partial)
        _rename(partial, path)
    finally:
        remove(partial)


def _rename(partial: Path, path: Path) -> None:
    try:
        partial.rename(path)
    except OSError:
        # Without a common lock, another process may have finished first. Its result is the same.
        if not path.exists():
            raise

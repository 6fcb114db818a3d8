"""What is made once and kept: generated samples, trained tokenizers, tokenised texts."""

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
    """The cache: ``$DISTEXP_CACHE``, else ``$XDG_CACHE_HOME/distexp``, else ``~/.cache/distexp``."""
    own = os.environ.get("DISTEXP_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "distexp"


def build_once(path: Path, build: Callable[[Path], None]) -> Path:
    """A file or folder that exists when this returns, built by one process while the others wait.

    Args:
        path: where the result lies. Its name must hold a format version and what it was made from:
            what is there is never built again.
        build: makes the result, a file or a folder, at the path that it is given: a sibling that is
            renamed when complete, so that a killed builder leaves nothing that is taken for a result.

    Returns:
        ``path``.

    Raises:
        ConfigError: the cache cannot be written.
    """
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = (path.parent / f".{path.name}.lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"The cache {path.parent} cannot be written ({error.strerror}): set DISTEXP_CACHE to another"
        ) from error
    with lock:
        alone = _acquire(lock)
        if not path.exists():
            _build_and_rename(path, build, alone=alone)
    return path


def _acquire(lock: IO[str]) -> bool:
    """Waits for a lock that dies with its process; False where the file system knows no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _build_and_rename(path: Path, build: Callable[[Path], None], *, alone: bool) -> None:
    mine = f".{path.name}.{socket.gethostname()}"
    if alone:
        # Of this host only: some network file systems keep their locks to each host.
        for left_behind in path.parent.glob(f"{mine}-*.partial"):
            remove(left_behind)
    partial = path.parent / f"{mine}-{os.getpid()}.partial"
    try:
        build(partial)
        _rename(partial, path)
    finally:
        remove(partial)


def _rename(partial: Path, path: Path) -> None:
    try:
        partial.rename(path)
    except OSError:
        # Without a common lock another builder may have come first: its result is as good.
        if not path.exists():
            raise

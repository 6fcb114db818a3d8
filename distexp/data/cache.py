"""What is made once and kept: generated samples, trained tokenizers, tokenised texts."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from distexp.config import ConfigError


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
        build: makes the result, a file or a folder, at the path that it is given. It works on a
            sibling that is renamed when complete, so a killed builder leaves nothing that is taken for a result.

    Returns:
        ``path``.

    Raises:
        ConfigError: the cache cannot be written.
    """
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent / f".{path.name}.lock") as alone:
            if not path.exists():
                _build_and_rename(path, build, alone)
    except PermissionError as error:
        raise ConfigError(
            f"The cache {path.parent} cannot be written ({error.strerror}): set DISTEXP_CACHE to a folder of yours"
        ) from error
    return path


def _build_and_rename(path: Path, build: Callable[[Path], None], alone: bool) -> None:
    if alone:
        for left_behind in path.parent.glob(f".{path.name}.*.partial"):
            _remove(left_behind)
    partial = path.parent / f".{path.name}.{socket.gethostname()}-{os.getpid()}.partial"
    try:
        build(partial)
        partial.rename(path)
    except OSError:
        # Without a lock another builder may have come first: its result is as good.
        if alone or not path.exists():
            raise
    finally:
        _remove(partial)


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Holds a lock that dies with its process; yields False where the file system knows no locks."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

"""Files and folders that appear under their names only when they are complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path, and rename it over ``path`` when the block ends.

    The block writes a file or a folder there. If it raises, the temporary path is removed and ``path`` is unchanged.
    The temporary path is next to ``path``, and its name starts with a dot.
    """
    with _temporary(path) as temporary:
        yield temporary
        move_into_place(temporary, path)


@contextmanager
def create_atomically(folder: Path) -> Iterator[Path]:
    """Yield a temporary path, and rename it to a folder that must not exist when the block ends.

    Raises:
        OSError: at the end of the block, if another process has created the folder.
    """
    with _temporary(folder) as temporary:
        yield temporary
        temporary.rename(folder)


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
    finally:
        remove(temporary)


def move_into_place(temporary: Path, path: Path) -> None:
    """Rename a complete file or folder to ``path``, and replace what is there."""
    if path.is_dir():
        shutil.rmtree(path)
    temporary.replace(path)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all its content. Ignore one that does not exist."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def flush_names(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

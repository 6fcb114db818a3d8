"""The line that raised an error, outside of the libraries that a user does not change."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Collection, Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from distexp.config.paths import PACKAGE

LIBRARIES = ("torch", "triton")
"""Packages whose lines are never named, like those of distexp and of Python."""

INSTALLED = ("site-packages", "dist-packages")
"""Names of the folders into which packages are installed."""


def code_place(error: BaseException) -> str:
    """Return the innermost line outside of Python, torch, triton and distexp.

    Returns:
        For example ``transformers/modeling.py:12``; empty if there is none.
    """
    return _innermost(_places(error))


def custom_code_place(error: BaseException, trusted: Collection[str]) -> str:
    """Return the innermost line of custom code.

    Args:
        error: What was raised.
        trusted: Packages that are custom code even if they are installed.

    Returns:
        For example ``my_package/model.py:12``; empty if there is none.
    """
    return _innermost((path, line) for path, line in _places(error) if _installed_package(path) in ("", *trusted))


def _innermost(places: Iterator[tuple[Path, int]]) -> str:
    """Return the last of some lines, as text."""
    return next((f"{'/'.join(path.parts[-2:])}:{line}" for path, line in reversed(list(places))), "")


def _places(error: BaseException) -> Iterator[tuple[Path, int]]:
    """Yield the lines of the traceback that are in files outside of the libraries."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        if name and not name.startswith("<") and not _in_library(Path(name)):
            yield Path(name), line


def _installed_package(path: Path) -> str:
    """Return the installed package or module of a file; empty if the file is not installed."""
    return next((Path(path.parts[path.parts.index(name) + 1]).stem for name in INSTALLED if name in path.parts), "")


def _in_library(path: Path) -> bool:
    """Return whether a file belongs to Python, torch, triton or distexp."""
    file, python = path.resolve(), Path(sysconfig.get_path("stdlib")).resolve()
    in_python = file.is_relative_to(python) and not _installed_package(file.relative_to(python))
    return in_python or any(file.is_relative_to(folder) for folder in _library_folders())


@lru_cache(maxsize=1)
def _library_folders() -> tuple[Path, ...]:
    specs = [spec for name in LIBRARIES if (spec := find_spec(name)) is not None]
    folders = (Path(folder).resolve() for spec in specs for folder in spec.submodule_search_locations or ())
    return (PACKAGE, *folders)

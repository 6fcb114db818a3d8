"""The line of a user's code that raised an error."""

from __future__ import annotations

import sysconfig
import traceback
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from distexp.config.paths import PACKAGE

LIBRARIES = ("torch", "triton")
"""Packages whose lines are not the cause that a user can change. So are those of distexp and of Python."""


def code_place(error: BaseException) -> str:
    """Return the innermost line outside of the libraries, as in ``my_package/model.py:12``; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename[0] != "<" and not _in_library(Path(frame.filename).resolve())]
    return f"{'/'.join(Path(own[-1].filename).parts[-2:])}:{own[-1].lineno}" if own else ""


def _in_library(path: Path) -> bool:
    """Return whether a file belongs to Python, torch, triton or distexp."""
    python = Path(sysconfig.get_path("stdlib")).resolve()
    if path.is_relative_to(python):
        installed = path.relative_to(python).parts[0] in ("site-packages", "dist-packages")
        return not installed or any(path.is_relative_to(folder) for folder in _library_folders())
    return any(path.is_relative_to(folder) for folder in _library_folders())


@lru_cache(maxsize=1)
def _library_folders() -> tuple[Path, ...]:
    specs = [spec for name in LIBRARIES if (spec := find_spec(name)) is not None]
    folders = (Path(folder).resolve() for spec in specs for folder in spec.submodule_search_locations or ())
    return (PACKAGE, *folders)

"""Checks of a sweep directory that another user has made, before runs are written into it."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from distexp.config import ConfigError
from distexp.launch.trust.own_files import is_own_file
from distexp.runs.listing import join_first
from distexp.runs.run_dir import COMMAND

MAX_SHOWN = 3


def check_working_directory(path: Path, directory: str) -> None:
    """Check that the current folder is that of a foreign command, because Python imports packages from it.

    A folder that does not exist is not used.

    Args:
        path: File of the stored command, for the message.
        directory: The folder in which the command was started.

    Raises:
        ConfigError: the folder is another one.
    """
    if os.path.isdir(directory) and not os.path.samefile(directory, os.curdir):
        raise ConfigError(
            f"{path} was started in {directory}, and Python would import packages from there: if you trust its "
            f"code, run cd {shlex.quote(directory)} and resume again"
        )


def check_files(sweep_dir: Path) -> None:
    """Check that a foreign sweep contains only files and folders, so that runs overwrite no file outside of it.

    Raises:
        ConfigError: with the first links that lead out of the sweep, pipes and devices.
    """
    if is_own_file(sweep_dir / COMMAND) or not sweep_dir.is_dir():
        return
    found = list(_unsafe_files(sweep_dir))
    if found:
        shown = join_first(map(str, found), MAX_SHOWN)
        raise ConfigError(
            f"{sweep_dir} contains {shown}, which are not files of the sweep: remove them, or start the sweep again "
            "in another directory"
        )


def _unsafe_files(sweep_dir: Path) -> Iterator[Path]:
    """Yield the links that lead out of a folder, and what is neither a file nor a folder."""
    root = sweep_dir.resolve()
    for where, folders, names in os.walk(sweep_dir):
        for path in (Path(where, name) for name in (*folders, *names)):
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                if not Path(os.path.realpath(path)).is_relative_to(root):
                    yield path
            elif not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                yield path

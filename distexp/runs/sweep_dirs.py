"""The sweep that a command is about: the newest one, or why a folder is none."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from distexp.config import ConfigError
from distexp.runs.run_dir import COMMAND, OUTPUTS


def choose_newest_sweep() -> Path:
    """Return the newest sweep below ``multirun_outputs/``, and print which one it is to stderr.

    Raises:
        ConfigError: if there is none.
    """
    newest = max(_command_files(Path(OUTPUTS)), key=_modified, default=None)
    if newest is None:
        raise ConfigError(f"no sweep below {OUTPUTS}/ in {Path.cwd()}: give the directory of a sweep")
    sweep_dir = newest.parent
    print(f"newest sweep: {sweep_dir}", file=sys.stderr)
    return sweep_dir


def _command_files(folder: Path) -> Iterator[Path]:
    """Yield the command file of every sweep below a folder."""
    for where, subfolders, files in os.walk(folder):
        if COMMAND in files:
            subfolders.clear()  # A sweep contains no other sweep.
            yield Path(where, COMMAND)


def not_a_sweep(directory: Path, missing: str) -> str:
    """Return why a directory is not a sweep, with the directory to give instead if it is inside or above one.

    Args:
        directory: The directory that the user gave.
        missing: What a sweep would contain, as in ``command.json``.
    """
    if not directory.is_dir():
        problem = "is a file" if directory.exists() else "does not exist"
        return f"{directory} {problem}: give the directory of a sweep"
    for above in directory.absolute().parents:
        if (above / COMMAND).is_file():
            return f"{directory} is not a sweep but is inside one: give {above}"
    below = [*directory.glob(f"*/{COMMAND}"), *directory.glob(f"*/*/{COMMAND}")]
    example = f", such as {max(below, key=_modified).parent}" if below else ""
    return f"{directory} contains no {missing}: give the directory of a sweep{example}"


def _modified(path: Path) -> float:
    return path.stat().st_mtime

"""The sweep that a command is about: the newest one, or why a folder is none."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from distexp.config import Command, ConfigError
from distexp.runs.json_files import read_or_none
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import CHOICE, COMMAND, OUTPUTS


def choose_newest_sweep(*, leave_out: Collection[Command] = ()) -> Path:
    """Return the newest sweep below ``multirun_outputs/``, and print which one it is to stderr.

    Args:
        leave_out: Commands whose directories are no sweeps here.

    Raises:
        ConfigError: if there is none.
    """
    files = sorted(_command_files(Path(OUTPUTS)), key=_modified, reverse=True)
    newest = next((file for file in files if not _is_of(file, leave_out)), None)
    if newest is None:
        raise ConfigError(f"no sweep below {OUTPUTS}/ in {Path.cwd()}: give the directory of a sweep")
    sweep_dir = newest.parent
    names = " and ".join(leave_out)
    skipped = "" if newest is files[0] else f" (later directories of {names} do not count)"
    print(f"newest sweep: {sweep_dir}{skipped}", file=sys.stderr)
    return sweep_dir


def _is_of(command_file: Path, commands: Collection[Command]) -> bool:
    """Return whether a sweep was started by one of these commands. A damaged file is of none."""
    return read_or_none(command_file, "command") in commands


def describe_no_training(record: RunRecord) -> str:
    """Return what a run is that trains nothing for the user, and what to give instead; empty if it is a training."""
    command = record.config.get("command")
    if command == Command.CHOOSE:
        return f"is a search of distexp choose: run the command of its winner ({CHOICE}) with profile=true"
    if command == Command.PREFLIGHT:
        return "is a preflight: give the directory of a training with profile=true"
    return ""


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

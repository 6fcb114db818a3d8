"""Claims of run directories: two commands that write into one sweep never share a run directory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig, open_dict

from distexp.config import ConfigError
from distexp.runs.command_text import suggest_command
from distexp.runs.listing import join_first
from distexp.runs.run_dir import ATTEMPT_FILES, HYDRA, PREDICTED


def run_dir_for(composed: DictConfig, sweep_dir: Path, number: int) -> Path:
    """Return the directory of a cell as run ``number`` of a sweep, and set both in its hydra node."""
    with open_dict(composed):
        composed.hydra.job.id = composed.hydra.job.num = number
        composed.hydra.sweep.dir = str(sweep_dir)
    return (sweep_dir / str(composed.hydra.sweep.subdir)).absolute()


class ClaimedDir(NamedTuple):
    """Number and directory of a run that no other command can get."""

    number: int
    directory: Path


def claim_run_dir(directory_of: Callable[[int], Path], first: int, *, resume: bool) -> ClaimedDir:
    """Claim the first free run directory by creating its ``.hydra`` folder.

    Creating a folder is atomic, so two commands never share a run directory.

    Args:
        directory_of: Returns the directory of a number.
        first: First number to try.
        resume: Whether the sweep is resumed. It changes the message only.

    Raises:
        ConfigError: if every number has the same directory (``hydra.run.dir``), and it is taken, or if the directory
            contains files of something else.
    """
    for number in itertools.count(first):
        directory = directory_of(number)
        directory.mkdir(parents=True, exist_ok=True)
        try:
            (directory / HYDRA).mkdir()
        except FileExistsError:
            if directory == directory_of(number + 1):
                raise ConfigError(_taken_message(directory, resume=resume)) from None
            continue
        _check_no_foreign_files(directory)
        return ClaimedDir(number, directory)
    raise AssertionError("unreachable")


def _check_no_foreign_files(directory: Path) -> None:
    """Check that a new run directory has no files that the run would move to ``attempts/``.

    Raises:
        ConfigError: with their names.
    """
    found = [name for name in (*ATTEMPT_FILES, PREDICTED) if (directory / name).exists()]
    if found:
        (directory / HYDRA).rmdir()
        raise ConfigError(
            f"{directory} contains {join_first(found)}, which belong to no run, and a run writes files with these "
            "names: choose another directory"
        )


def _taken_message(directory: Path, *, resume: bool) -> str:
    if resume:
        return (
            f"{directory} contains a single run (hydra.run.dir), and the new overrides define a different run: resume "
            f"without them, or start the new run in another directory. Add train.resume={directory} to start it from "
            "the last checkpoint of this run"
        )
    return (
        f"hydra.run.dir={directory} contains a run already: choose another directory, or resume that run with "
        f"{suggest_command('resume', directory)}"
    )

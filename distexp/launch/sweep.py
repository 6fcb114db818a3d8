"""Cells of a sweep: composed and checked before any run starts, then numbered, each with a run directory."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from distexp.config import Config, ConfigError
from distexp.launch.outcome import invalid_record
from distexp.launch.snapshot import GitState
from distexp.launch.trust import check_trust, packages_trusted_by_user
from distexp.resolve import resolve, without_hydra
from distexp.resolve.run_id import run_id
from distexp.runs.existing import ExistingRun, ExistingRuns, unmatched_message
from distexp.runs.files import write_json
from distexp.runs.record import RunInfo, RunRecord
from distexp.runs.run_dir import COMMAND, HYDRA, MULTIRUN
from distexp.runs.text import suggest_command


@dataclass
class Cell:
    """The overrides of one run, and what Hydra and ``resolve`` made of them.

    Attributes:
        composed: Composed configuration, with the hydra node.
        config: Resolved configuration; None for an invalid cell.
        decided: Configuration of an invalid cell, with the values that were decided before its errors were found.
        errors: Why the cell is invalid.
        varied: Overrides that not all cells share.
    """

    overrides: list[str]
    composed: DictConfig
    config: Config | None = None
    decided: Config | None = None
    errors: list[str] = field(default_factory=list)
    varied: list[str] = field(default_factory=list)


Adjust = Callable[[DictConfig, Sequence[str]], None]
"""Function that changes the composed configuration of a cell before it is resolved. It may raise ConfigError."""


def compose_cells(
    context: HydraContext, master: DictConfig, overrides: Sequence[Sequence[str]], adjust: Adjust | None = None
) -> list[Cell]:
    """Compose and resolve every cell, before any run starts.

    Raises:
        ConfigError: if there is one cell only, and it is invalid.
        HydraException: if Hydra cannot compose a cell.
    """
    cells = []
    trusted = packages_trusted_by_user(sys.argv[1:])
    for wanted in overrides:
        composed = context.config_loader.load_sweep_config(master, list(wanted))
        cell = Cell(list(wanted), composed)
        try:
            check_trust(composed, trusted)
            if adjust is not None:
                adjust(composed, cell.overrides)
            cell.config = resolve(composed, composed.hydra.runtime.choices)
        except ConfigError as error:
            cell.errors, cell.decided = error.errors, error.config
        cells.append(cell)
    shared = set.intersection(*(set(cell.overrides) for cell in cells))
    for cell in cells:
        cell.varied = [text for text in cell.overrides if text not in shared]
    if len(cells) == 1 and cells[0].errors:
        raise ConfigError(cells[0].errors)
    return cells


def make_run_info(cell: Cell, number: int, code: GitState, snapshot: str | None = None) -> RunInfo:
    """Return the identity of a cell's run."""
    overrides = [text.replace("'", "") for text in cell.overrides if not text.startswith("sweep.")]
    name = str(cell.composed.name) if cell.config is None else cell.config.name
    identity = "invalid" if cell.config is None else run_id(cell.config)
    return RunInfo(identity, name, number, overrides, git_sha=code.sha, git_dirty=code.dirty, snapshot=snapshot)


def write_invalid(cell: Cell, info: RunInfo, directory: Path) -> RunRecord:
    """Write the record of an invalid cell and return it."""
    content = _composed_content(cell) if cell.decided is None else asdict(cell.decided)
    record = invalid_record(info, content, cell.errors)
    record.write(directory)
    return record


def _composed_content(cell: Cell) -> dict[str, Any]:
    composed = without_hydra(cell.composed)
    try:
        content: Any = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException:  # An interpolation of a missing key may be the error.
        content = OmegaConf.to_container(composed)
    return dict(content)


def run_dir_for(cell: Cell, sweep_dir: Path, number: int) -> Path:
    """Return the directory of a cell as run ``number`` of a sweep, and set both in its hydra node."""
    with open_dict(cell.composed):
        cell.composed.hydra.job.id = cell.composed.hydra.job.num = number
        cell.composed.hydra.sweep.dir = str(sweep_dir)
    return (sweep_dir / str(cell.composed.hydra.sweep.subdir)).absolute()


def create_sweep_dir(master: DictConfig) -> Path:
    """Create the directory of a sweep and return it. A resumed sweep has one already."""
    chosen = any(text.startswith("hydra.sweep.dir=") for text in master.hydra.overrides.hydra)
    return claim_sweep_dir(Path(master.hydra.sweep.dir), chosen_by_user=chosen)


def claim_sweep_dir(wanted: Path, *, chosen_by_user: bool) -> Path:
    """Create the directory of a sweep. If another command has just taken the default one, add a suffix."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    if chosen_by_user:
        wanted.mkdir(exist_ok=True)
        return wanted
    for attempt in itertools.count(1):
        candidate = wanted if attempt == 1 else wanted.with_name(f"{wanted.name}_{attempt}")
        try:
            candidate.mkdir()
        except FileExistsError:
            continue
        return candidate
    raise AssertionError("unreachable")


def assign_run_dirs(
    cells: Sequence[Cell],
    sweep_dir: Path,
    code: GitState,
    *,
    resume: bool,
    should_skip: Callable[[ExistingRun], bool],
    warn: Callable[[str], None],
    snapshot: str | None = None,
    active: Collection[int] = (),
) -> Iterator[tuple[Cell, RunInfo, Path]]:
    """Yield each cell to run with its number and directory, which is claimed at that moment.

    A cell with an existing run keeps the number and directory of that run.

    Args:
        cells: Cells of the sweep.
        sweep_dir: Directory of the sweep.
        code: Git state of the code.
        resume: Whether the sweep may have existing runs.
        should_skip: Returns whether the existing run of a cell is kept, so that the cell does not run.
        warn: Prints a warning about existing runs that no cell matches.
        snapshot: Copy of the code that the runs use.
        active: Numbers of runs that have not ended. The warning leaves them out.
    """
    existing = ExistingRuns.read(sweep_dir) if resume else ExistingRuns()
    infos = [make_run_info(cell, 0, code, snapshot) for cell in cells]
    matches = existing.match([(info.id, info.overrides) for info in infos])
    warning = unmatched_message([run for run in existing.unfinished(below=sweep_dir) if run.number not in active])
    if warning is not None:
        warn(warning)
    free = 0
    for cell, info, known in zip(cells, infos, matches, strict=True):
        if known is None:
            info.number, directory = claim_run_dir(partial(run_dir_for, cell, sweep_dir), free, resume=resume)
            free = info.number + 1
        elif should_skip(known):
            continue
        else:
            info.number, directory = known.number, run_dir_for(cell, sweep_dir, known.number)
        yield cell, info, directory


def claim_run_dir(directory_of: Callable[[int], Path], first: int, *, resume: bool) -> tuple[int, Path]:
    """Claim the first free run directory by creating its ``.hydra`` folder.

    Creating a folder is atomic, so two commands never share a run directory.

    Args:
        directory_of: Returns the directory of a number.
        first: First number to try.
        resume: Whether the sweep is resumed. It changes the message only.

    Returns:
        The number and its directory.

    Raises:
        ConfigError: if every number has the same directory (``hydra.run.dir``), and it is taken.
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
        return number, directory
    raise AssertionError("unreachable")


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


def write_sweep_files(master: DictConfig, sweep_dir: Path, cells: int) -> None:
    """Write Hydra's ``multirun.yaml``, and the command line for ``distexp resume``; keep existing files.

    Args:
        master: Configuration of the command, with the hydra node.
        sweep_dir: Directory of the sweep.
        cells: Number of cells.
    """
    path = sweep_dir / MULTIRUN
    if not path.exists():
        OmegaConf.save(master, path)
    if not (sweep_dir / COMMAND).exists():
        write_json(sweep_dir / COMMAND, {"words": sys.argv[1:], "directory": os.getcwd(), "cells": cells})

"""The runs of one command: judged before any of them starts, numbered, run, and compared."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from distexp.config import Config, ConfigError
from distexp.launch.outcome import invalid_record
from distexp.launch.snapshot import GitState
from distexp.resolve import resolve, without_hydra
from distexp.resolve.run_id import run_id
from distexp.runs.existing import COMMAND, ExistingRun, ExistingRuns, unmatched_message
from distexp.runs.record import RunInfo, RunRecord, write_json


@dataclass
class Cell:
    """One run to be: its overrides, what Hydra composed of them, and the verdict."""

    overrides: list[str]
    composed: DictConfig  # with the hydra node
    config: Config | None = None
    errors: list[str] = field(default_factory=list)
    varied: list[str] = field(default_factory=list)  # the overrides that not all cells share


Adjust = Callable[[DictConfig, Sequence[str]], None]
"""Changes what was composed for a cell before it is judged; ConfigError where it cannot."""


def compose_cells(
    context: HydraContext, master: DictConfig, overrides: Sequence[Sequence[str]], adjust: Adjust | None = None
) -> list[Cell]:
    """Composes every cell once and judges it; what Hydra refuses aborts before anything starts."""
    cells = []
    for wanted in overrides:
        composed = context.config_loader.load_sweep_config(master, list(wanted))
        cell = Cell(list(wanted), composed)
        try:
            if adjust is not None:
                adjust(composed, cell.overrides)
            cell.config = resolve(composed, composed.hydra.runtime.choices)
        except ConfigError as error:
            cell.errors = error.errors
        cells.append(cell)
    shared = set.intersection(*(set(cell.overrides) for cell in cells))
    for cell in cells:
        cell.varied = [text for text in cell.overrides if text not in shared]
    if len(cells) == 1 and cells[0].errors:
        raise ConfigError(cells[0].errors)
    return cells


def run_info(cell: Cell, number: int, code: GitState, snapshot: str | None = None) -> RunInfo:
    """Which run a cell becomes."""
    overrides = [text.replace("'", "") for text in cell.overrides if not text.startswith("sweep.")]
    name = str(cell.composed.name) if cell.config is None else cell.config.name
    identity = "invalid" if cell.config is None else run_id(cell.config)
    return RunInfo(identity, name, number, overrides, git_sha=code.sha, git_dirty=code.dirty, snapshot=snapshot)


def write_invalid(cell: Cell, info: RunInfo, directory: Path) -> RunRecord:
    """The record of a cell that cannot run."""
    composed = without_hydra(cell.composed)
    try:
        content: Any = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException:  # a reference to nothing may be the very error
        content = OmegaConf.to_container(composed)
    record = invalid_record(info, content, cell.errors)
    record.write(directory)
    return record


def run_dir_for(cell: Cell, sweep_dir: Path, number: int) -> Path:
    """The directory that a cell has as run ``number`` of a sweep, which Hydra's part of it is told."""
    with open_dict(cell.composed):
        cell.composed.hydra.job.id = cell.composed.hydra.job.num = number
        cell.composed.hydra.sweep.dir = str(sweep_dir)
    return (sweep_dir / str(cell.composed.hydra.sweep.subdir)).absolute()


def sweep_directory(master: DictConfig) -> Path:
    """The directory of a sweep, made; one that is resumed is there."""
    chosen = any(text.startswith("hydra.sweep.dir=") for text in master.hydra.overrides.hydra)
    return claim_sweep_dir(Path(master.hydra.sweep.dir), chosen_by_user=chosen)


def claim_sweep_dir(wanted: Path, *, chosen_by_user: bool) -> Path:
    """Makes the directory of a sweep; a default one that another command just took gets a suffix."""
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
    """Each cell that is to run, numbered, with its directory, claimed when its turn comes.

    A cell with an existing run keeps its number and directory. It is left out if ``should_skip`` returns true.
    ``warn`` hears first of runs that would go on, had they not become others; not of ``active`` ones, by number.
    """
    earlier = ExistingRuns.read(sweep_dir) if resume else ExistingRuns()
    infos = [run_info(cell, 0, code, snapshot) for cell in cells]
    matches = earlier.match([(info.id, info.overrides) for info in infos])
    left = unmatched_message([run for run in earlier.unfinished(below=sweep_dir) if run.number not in active])
    if left is not None:
        warn(left)
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
    """The first number from ``first`` on whose directory no run has, claimed by making its ``.hydra``.

    Making a folder is atomic, so two commands never share a run directory. Where every number has the
    same directory (``hydra.run.dir``), one that is taken is refused.
    """
    for number in itertools.count(first):
        directory = directory_of(number)
        directory.mkdir(parents=True, exist_ok=True)
        try:
            (directory / ".hydra").mkdir()
        except FileExistsError:
            if directory == directory_of(number + 1):
                raise ConfigError(_taken(directory, resume=resume)) from None
            continue
        return number, directory
    raise AssertionError("unreachable")


def _taken(directory: Path, *, resume: bool) -> str:
    if resume:
        return (
            f"{directory} holds a single run (hydra.run.dir), and what is asked for now is another one: resume it "
            f"without new values, or start the other in a directory of its own, with train.resume={directory} from "
            "this one's checkpoint"
        )
    return (
        f"hydra.run.dir={directory} holds a run already: choose another directory, or let that run go on with "
        f"python -m distexp.resume {directory}"
    )


def save_master(master: DictConfig, sweep_dir: Path, cells: int) -> None:
    """Hydra's own record of a sweep, where its users look for it, and the command that resumes it, with its runs."""
    path = sweep_dir / "multirun.yaml"
    if not path.exists():
        OmegaConf.save(master, path)
    if not (sweep_dir / COMMAND).exists():
        write_json(sweep_dir / COMMAND, {"words": sys.argv[1:], "directory": os.getcwd(), "cells": cells})

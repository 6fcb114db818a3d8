"""The runs of one command: judged before any of them starts, numbered, run, and compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from distexp.config import Config, ConfigError
from distexp.resolve import resolve, without_hydra


@dataclass
class Cell:
    """One run to be: its overrides, what Hydra composed of them, and the verdict."""

    overrides: list[str]
    composed: DictConfig  # with the hydra node
    config: Config | None = None
    faults: list[str] = field(default_factory=list)
    varied: list[str] = field(default_factory=list)  # the overrides that not all cells share


def compose_cells(context: HydraContext, master: DictConfig, overrides: Sequence[Sequence[str]]) -> list[Cell]:
    """Composes every cell once and judges it; what Hydra refuses aborts before anything starts."""
    cells = []
    for wanted in overrides:
        composed = context.config_loader.load_sweep_config(master, list(wanted))
        cell = Cell(list(wanted), composed)
        try:
            cell.config = resolve(without_hydra(composed), composed.hydra.runtime.choices)
        except ConfigError as error:
            cell.faults = error.faults
        cells.append(cell)
    shared = set.intersection(*(set(cell.overrides) for cell in cells))
    for cell in cells:
        cell.varied = [text for text in cell.overrides if text not in shared]
    if len(cells) == 1 and cells[0].faults:
        raise ConfigError(cells[0].faults)
    return cells


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


def claim_run_dir(directory_of: Callable[[int], Path], first: int) -> tuple[int, Path]:
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
                raise ConfigError(f"hydra.run.dir={directory} holds a run already: choose another directory") from None
            continue
        return number, directory
    raise AssertionError("unreachable")


def save_master(master: DictConfig, sweep_dir: Path) -> None:
    """Hydra's own record of a sweep, where its users look for it."""
    path = sweep_dir / "multirun.yaml"
    if not path.exists():
        OmegaConf.save(master, path)

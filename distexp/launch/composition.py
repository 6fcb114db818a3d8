"""Composition of the cells of a sweep, in parallel and with one composition by Hydra for each choice of options.

Hydra needs about 50 ms for a composition, mostly to read YAML files and to merge them. Cells that choose the same
options differ only in values, which are set on a copy.
"""

from __future__ import annotations

import pickle
import signal
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cached_property, partial
from multiprocessing import get_context
from os import getpid
from pathlib import Path
from typing import Any, cast

from hydra._internal.config_loader_impl import get_overrides_dirname
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from distexp.config import Config, ConfigError
from distexp.console.progress import show_progress
from distexp.exceptions import SweepInterrupted
from distexp.launch.config_loader import CheckedConfigLoader
from distexp.launch.plan_keys import ignored_plan_keys
from distexp.launch.trust import check_trust, packages_trusted_by_user
from distexp.resolve import resolve
from distexp.resolve.run_id import run_id
from distexp.runs.prediction import Curve, remove_prediction, write_prediction
from distexp.runs.record import INVALID_ID, Predicted
from distexp.system.hardware import cpu_count
from distexp.system.processes import die_with_parent

MAX_PROCESSES = 8
"""Most processes that compose; a login node has many cores and many users."""

MIN_PARALLEL, CHUNK = 32, 8
"""Number of cells from which processes are started, and number of cells that a process composes at a time."""


@dataclass
class Cell:
    """The overrides of one run, and what Hydra and ``resolve`` made of them.

    Attributes:
        overrides: Overrides of the cell.
        packed: Composed configuration, pickled and compressed. A sweep may have thousands of cells.
        config: Resolved configuration; None for an invalid cell.
        decided: Configuration of an invalid cell, with the values that were decided before its errors were found.
        id: ``run.id`` of the run.
        errors: Why the cell is invalid.
        varied: Overrides that not all cells share.
        predicted: Predicted memory; None if it is not predicted.
        curve: Predicted memory through a training step.
    """

    overrides: list[str]
    packed: bytes
    config: Config | None = None
    decided: Config | None = None
    id: str = INVALID_ID
    errors: list[str] = field(default_factory=list)
    varied: list[str] = field(default_factory=list)
    predicted: Predicted | None = None
    curve: Curve = field(default_factory=dict)

    @property
    def composed(self) -> DictConfig:
        """Return a new copy of the composed configuration, with the hydra node."""
        return cast(DictConfig, pickle.loads(zlib.decompress(self.packed)))

    def write_prediction(self, directory: Path) -> None:
        """Write the prediction into the directory of the cell's run. Without one, remove that of an earlier attempt."""
        if self.predicted is None:
            remove_prediction(directory)
        else:
            write_prediction(directory, self.predicted, self.curve)


Adjust = Callable[[DictConfig, Sequence[str]], None]
"""Function that changes the composed configuration of a cell before it is resolved. It may raise ConfigError."""

MakeCell = Callable[[Sequence[str]], Cell]


def compose_cells(
    context: HydraContext, master: DictConfig, overrides: Sequence[Sequence[str]], adjust: Adjust | None = None
) -> list[Cell]:
    """Compose and resolve every cell, before any run starts. Return them in the given order.

    Raises:
        ConfigError: if there is one cell only, and it is invalid, or if a key of ``plan`` has no effect.
        HydraException: if Hydra cannot compose a cell.
        SweepInterrupted: on Ctrl-C.
    """
    make = cell_maker(context, master, adjust)
    try:
        with show_progress("composing", len(overrides)) as advance:
            cells = []
            for cell in compose_all(make, overrides):
                cells.append(cell)
                advance()
    except KeyboardInterrupt:
        raise SweepInterrupted("interrupted while composing the cells: no run was started") from None
    shared = set.intersection(*(set(cell.overrides) for cell in cells))
    for cell in cells:
        cell.varied = [text for text in cell.overrides if text not in shared]
    if errors := _command_errors(cells, master):
        raise ConfigError(errors)
    return cells


def _command_errors(cells: Sequence[Cell], master: DictConfig) -> list[str]:
    """Return the errors for which a command is refused."""
    # Earlier versions stored overrides that they ignored.
    ignored = [] if master.sweep.resume else ignored_plan_keys((cell.overrides, cell.config) for cell in cells)
    as_json = master.plan.only and master.plan.output == "json"  # which has the errors
    # A search changes strategy and sizes, so a candidate may be valid.
    is_invalid = len(cells) == 1 and not as_json and not master.choose.only
    return [*(cells[0].errors if is_invalid else []), *ignored]


def cell_maker(context: HydraContext, master: DictConfig, adjust: Adjust | None = None) -> MakeCell:
    """Return the function that composes and resolves a cell of a command."""
    composer = CellComposer(cast(CheckedConfigLoader, context.config_loader), master)
    return partial(make_cell, composer, packages_trusted_by_user(sys.argv[1:]), adjust)


def make_cell(composer: CellComposer, trusted: Sequence[str], adjust: Adjust | None, overrides: Sequence[str]) -> Cell:
    """Compose and resolve one cell.

    Raises:
        HydraException: if Hydra cannot compose it.
    """
    composed = composer.compose(overrides)
    cell = Cell(list(overrides), b"")
    try:
        check_trust(composed, trusted)
        if adjust is not None:
            adjust(composed, overrides)
        cell.config = resolve(composed, composed.hydra.runtime.choices)
        cell.id = run_id(cell.config)
    except ConfigError as error:
        cell.errors, cell.decided = error.errors, error.config
    cell.packed = zlib.compress(pickle.dumps(composed), 1)
    return cell


class CellComposer:
    """Composition of cells with the result of Hydra's ``load_sweep_config``, but with one call for each choice."""

    def __init__(self, loader: CheckedConfigLoader, master: DictConfig) -> None:
        """Create the composer of a command.

        Args:
            loader: Hydra's configuration loader.
            master: Configuration of the command, with the hydra node.
        """
        self._loader, self._master = loader, master
        self._parser = OverridesParser.create()
        self._is_group: dict[str, bool] = {}
        self._bases: dict[tuple[str, ...], bytes] = {}

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Return the composed configuration of a cell.

        Raises:
            HydraException: if an override is wrong.
            ConfigError: if a foreign file contains values that could run code.
        """
        parsed = self._parser.parse_overrides(list(overrides))
        if any(override.is_hydra_override() for override in parsed):
            return self._loader.load_sweep_config(self._master, list(overrides))
        chosen = [override for override in parsed if self._chooses_option(override)]
        values = [override for override in parsed if not self._chooses_option(override)]
        composed = self._base(tuple(map(_text, chosen)))
        self._loader._apply_overrides_to_config(values, composed)
        composed.hydra.overrides.task = list(map(_text, parsed))
        job = composed.hydra.job
        job.override_dirname = get_overrides_dirname(parsed, **job.config.override_dirname)
        self._loader.check(composed)  # The values may be those of a foreign file, too.
        return composed

    def _base(self, chosen: tuple[str, ...]) -> DictConfig:
        """Return a copy of the configuration in which only options are chosen."""
        if chosen not in self._bases:
            self._bases[chosen] = pickle.dumps(self._loader.load_sweep_config(self._master, list(chosen)))
        return cast(DictConfig, pickle.loads(self._bases[chosen]))

    def _chooses_option(self, override: Override) -> bool:
        """Return whether an override chooses an option of a group, as Hydra decides it."""
        key = override.key_or_group
        if key not in self._is_group:
            config_name = self._master.hydra.job.config_name
            self._is_group[key] = bool(self._loader.get_group_options(key, None, config_name, self._hydra_overrides))
        return self._is_group[key] and not isinstance(override.value(), dict)

    @cached_property
    def _hydra_overrides(self) -> list[str]:
        return cast(list[str], OmegaConf.to_container(self._master.hydra.overrides.hydra))


def _text(override: Override) -> str:
    assert override.input_line is not None
    return override.input_line


def compose_all(make: MakeCell, overrides: Sequence[Sequence[str]]) -> Iterator[Cell]:
    """Yield all cells in order. If there are many, several processes make them.

    Raises:
        OSError: if a process was killed.
    """
    if not overrides:
        return
    # The processes inherit what the first cell has imported, read and composed.
    yield make(overrides[0])
    processes = min(cpu_count(), MAX_PROCESSES, len(overrides) // CHUNK)
    if len(overrides) < MIN_PARALLEL or processes < 2:
        yield from map(make, overrides[1:])
        return
    done = 1
    for cells in _compose_chunks(make, overrides, processes):
        yield from cells
        done += len(cells)
        end = min(done - len(cells) + CHUNK, len(overrides))
        # A process returns fewer cells if one raises. Here the same cell raises an error that has its cause.
        yield from map(make, overrides[done:end])
        done = end


def _compose_chunks(make: MakeCell, overrides: Sequence[Sequence[str]], processes: int) -> Iterator[list[Cell]]:
    """Yield the cells after the first one in chunks."""
    pool = ProcessPoolExecutor(processes, get_context("fork"), _start_process, (make, overrides, getpid()))
    try:
        yield from pool.map(_compose_chunk, range(1, len(overrides), CHUNK))
    except BrokenProcessPool:
        raise OSError("a process that composed cells was killed, and no run was started: try again") from None
    finally:
        pool.shutdown(cancel_futures=True)


_inherited: dict[str, Any] = {}


def _start_process(make: MakeCell, overrides: Sequence[Sequence[str]], parent: int) -> None:
    """Prepare a process that composes. On Ctrl-C the launcher ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent=parent)
    _inherited.update(make=make, overrides=overrides)


def _compose_chunk(start: int) -> list[Cell]:
    """Return up to CHUNK cells, fewer if a cell raises an error."""
    cells: list[Cell] = []
    for wanted in _inherited["overrides"][start : start + CHUNK]:
        try:
            cells.append(_inherited["make"](wanted))
        except Exception:  # The launcher makes this cell again, and raises the error.
            break
    return cells

"""Composition of the cells of a command, before any run starts: an error must not appear after hours of training."""

from __future__ import annotations

import pickle
import sys
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from distexp.config import ConfigError
from distexp.config.override_text import key_of
from distexp.console.progress import show_progress
from distexp.exceptions import SweepInterrupted
from distexp.guard.command_line import packages_trusted_by_user
from distexp.guard.config_files import CheckedConfigLoader, check_trust
from distexp.launch.cell import Cell, MakeCell
from distexp.launch.cell_composer import CellComposer
from distexp.launch.lowered_values import lowered_values
from distexp.launch.parallel_composition import compose_all
from distexp.launch.plan_keys import ignored_plan_keys
from distexp.launch.replaced_accumulation import replaced_accumulation
from distexp.resolve import resolve
from distexp.resolve.run_id import run_id

Adjust = Callable[[DictConfig, Sequence[str]], None]
"""Function that changes the composed configuration of a cell before it is resolved. It may raise ConfigError."""


class CellRules(NamedTuple):
    """What a command accepts in its cells.

    Attributes:
        may_be_invalid: A command with one cell does not end if it is invalid.
        sizes_vary: The command varies the keys of ``train``, so it keeps none that was typed.
        keeps_accumulation: A typed number of accumulation steps may be replaced by that of a stored run.
    """

    may_be_invalid: bool = False
    sizes_vary: bool = False
    keeps_accumulation: bool = False


def compose_cells(
    context: HydraContext,
    master: DictConfig,
    overrides: Sequence[Sequence[str]],
    adjust: Adjust | None = None,
    rules: CellRules = CellRules(),  # noqa: B008
) -> list[Cell]:
    """Compose and resolve every cell, before any run starts. Return them in the given order.

    Args:
        context: Hydra's configuration loader and callbacks.
        master: Configuration of the command, with Hydra's node.
        overrides: The overrides of each cell.
        adjust: Changes a composed cell before it is resolved.
        rules: What the command accepts.

    Raises:
        ConfigError: if there is one cell only, and it is invalid, or if a key of ``plan`` has no effect.
        HydraException: if Hydra cannot compose a cell.
        SweepInterrupted: on Ctrl-C.
    """
    cells = _compose_with_progress(cell_maker(context, master, adjust), overrides)
    shared = set.intersection(*(set(cell.overrides) for cell in cells))
    for cell in cells:
        cell.varied = [text for text in cell.overrides if text not in shared]
    typed = {key for key in _keys_of_command(master) if not (rules.sizes_vary and key.startswith("train."))}
    if errors := _command_errors(cells, typed, rules, resumes=master.sweep.resume):
        raise ConfigError(errors)
    warnings = () if master.sweep.resume else lowered_values(cells, typed)
    for warning in warnings:
        print(f"distexp: warning: {warning}", file=sys.stderr)
    return cells


def _keys_of_command(master: DictConfig) -> set[str]:
    """Return the keys that the command itself sets, without those of a preset."""
    overrides = cast(list[str], OmegaConf.to_container(master.hydra.overrides.task))  # does not resolve ${...}
    return {key_of(text) for text in overrides}


def _compose_with_progress(make: MakeCell, overrides: Sequence[Sequence[str]]) -> list[Cell]:
    """Return the cells, and show how many are composed.

    Raises:
        SweepInterrupted: on Ctrl-C.
    """
    cells = []
    try:
        with show_progress("composing", len(overrides)) as advance:
            for cell in compose_all(make, overrides):
                cells.append(cell)
                advance()
    except KeyboardInterrupt:
        raise SweepInterrupted("interrupted while composing the cells: no run was started") from None
    return cells


def _command_errors(cells: Sequence[Cell], typed: set[str], rules: CellRules, *, resumes: bool) -> list[str]:
    """Return the errors for which a command is refused."""
    invalid = cells[0].errors if len(cells) == 1 and not rules.may_be_invalid else []
    ignored = ignored_plan_keys((cell.overrides, cell.config) for cell in cells)
    replaced = [] if resumes or rules.keeps_accumulation else replaced_accumulation(cells, typed)
    return [*invalid, *ignored, *replaced]


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

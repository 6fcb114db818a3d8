"""The step between composing the cells of a command and starting their runs: predict their memory or speed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from omegaconf import DictConfig

from distexp.config import ConfigError
from distexp.data.cache import cache_dir
from distexp.launch.cell import Cell, MakeCell


def _is_predicted(cell: Cell) -> bool:
    """Return whether a cell may be predicted. If not, its run does not wait for the import of the planner."""
    config = cell.config
    if config is None or config.plan.name == "off":
        return False
    return config.plan.name == "check" or _has_cache()


def _has_cache() -> bool:
    with suppress(ConfigError):  # Without a home directory there is no cache.
        return (cache_dir() / "plan").is_dir()
    return False


def plan_runs(cells: Sequence[Cell], master: DictConfig, make: MakeCell) -> bool:
    """Predict the memory or the speed of the cells if that is requested, and return whether that is all to do.

    Args:
        cells: The cells of the command.
        master: Configuration of the command.
        make: Composes a variant of a cell.

    Raises:
        ConfigError: with ``plan=check``, if there is one cell only, and it cannot fit.
    """
    if master.plan.only:
        _print_prediction(cells, master, make)
        return True
    if any(_is_predicted(cell) for cell in cells):
        from distexp.launch.memory_check import predict_runs

        predict_runs(cells, make)
    return False


def _print_prediction(cells: Sequence[Cell], master: DictConfig, make: MakeCell) -> None:
    if master.forecast.only:
        from distexp.forecast.command import run_forecast

        run_forecast(cells)
    else:
        from distexp.plan.command import run_plan

        run_plan(cells, make)

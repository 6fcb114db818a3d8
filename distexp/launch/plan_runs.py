"""The step between composing the cells of a command and starting their runs: predict their memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

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


def predict_before_start(cells: Sequence[Cell], make: MakeCell) -> None:
    """Predict the memory of cells if that is requested, or if predictions are cached.

    Args:
        cells: The cells of the command.
        make: Composes a variant of a cell.

    Raises:
        ConfigError: with ``plan=check``, if there is one cell only, and it cannot fit.
    """
    if any(_is_predicted(cell) for cell in cells):
        from distexp.launch.memory_check import predict_runs

        predict_runs(cells, make)

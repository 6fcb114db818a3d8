"""Errors for a ``train.gradient_accumulation_steps`` of the command that ``train.global_batch_size`` would replace."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from distexp.config.override_text import key_of, value_of
from distexp.launch.cell import Cell

ACCUMULATION = "train.gradient_accumulation_steps"


def replaced_accumulation(cells: Iterable[Cell], given: Container[str]) -> Iterator[str]:
    """Yield an error for each value that a cell would not use.

    Args:
        cells: The cells of a command.
        given: Keys of the command itself. A global batch on the command line may replace the value of a preset.
    """
    if ACCUMULATION in given:
        yield from dict.fromkeys(error for cell in cells for error in _errors(cell))


def _errors(cell: Cell) -> Iterator[str]:
    config = cell.config
    if config is None or config.train.global_batch_size is None or config.scale.name != "full":
        return
    steps = config.train.gradient_accumulation_steps
    for text in cell.overrides:
        if key_of(text) == ACCUMULATION and value_of(text) != str(steps):
            yield (
                f"{text} has no effect: train.global_batch_size={config.train.global_batch_size} sets the accumulation "
                f"to {steps}. Leave one of the two out"
            )

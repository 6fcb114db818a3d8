"""Lines about the invalid cells of a Slurm sweep, for its submission and for its dry run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from distexp.console.invalid_cells import InvalidCells
from distexp.console.plain_text import print_plain
from distexp.launch.cell import Cell
from distexp.runs.failure_text import join_errors


class InvalidPrinter:
    """Printer of why cells are invalid: one line for all cells with the same reason."""

    def __init__(self, cells: Sequence[Cell], console: Console, prefix: str = "") -> None:
        """Collect the reasons.

        Args:
            cells: All cells of the sweep.
            console: Where to print.
            prefix: Start of each line.
        """
        self._reasons = InvalidCells(join_errors(cell.errors) for cell in cells if cell.config is None)
        self._console, self._prefix = console, prefix

    def print(self, number: int, reason: str) -> None:
        """Print why a run is invalid, unless the reason was printed before."""
        if label := self._reasons.label(number, reason):
            print_plain(self._console, f"{self._prefix}{label}: invalid: {reason}")

"""Invalid cells of a sweep: each reason is printed once, with the number of cells that it concerns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class InvalidCells:
    """The reasons of the invalid cells of a sweep, and which ones were printed."""

    def __init__(self, reasons: Iterable[str]) -> None:
        """Count the cells of each reason.

        Args:
            reasons: The reason of each invalid cell.
        """
        self._counts = Counter(reasons)
        self._printed: set[str] = set()

    def label(self, number: int, reason: str) -> str | None:
        """Return which runs a reason concerns: ``run 0 and 3 more``. None if the reason was printed before.

        Args:
            number: Number of a run.
            reason: Why it is invalid.
        """
        if reason in self._printed:
            return None
        self._printed.add(reason)
        others = self._counts[reason] - 1
        return f"run {number}" + (f" and {others} more" if others > 0 else "")

"""Small tables of texts, for the terminal, the page and ``results.md``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NOT_MEASURED = "-"
"""Cell of a value that a run does not have."""


@dataclass(frozen=True)
class TextTable:
    """A small table of texts.

    Attributes:
        note: Text below the table.
        reasons: Numbered texts below the table, to which cells such as ``invalid [1]`` refer.
        num_labels: Number of columns that name the rows.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    reasons: tuple[str, ...] = ()
    num_labels: int = 1

    @classmethod
    def from_columns(
        cls, title: str, columns: Mapping[str, Sequence[str]], note: str = "", *, num_labels: int = 1
    ) -> TextTable:
        """Build a table from its columns by header. A column without any value is left out.

        Args:
            title: Title of the table.
            columns: Cells of each column, as many as there are rows.
            note: Text below the table.
            num_labels: Number of columns that name the rows.
        """
        kept = {header: cells for header, cells in columns.items() if set(cells) != {NOT_MEASURED}}
        labels = [header for header in list(columns)[:num_labels] if header in kept]
        return cls(title, tuple(kept), tuple(zip(*kept.values(), strict=True)), note, num_labels=len(labels))

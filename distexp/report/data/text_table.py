"""Small tables of texts, for the terminal, the page and ``results.md``."""

from __future__ import annotations

from dataclasses import dataclass


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

"""Small tables of texts, for the terminal, the page and ``results.md``.

On a terminal, titles and cells wrap between words if it is narrow. Columns that do not fit continue below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.console import RenderResult
from rich.table import Table
from rich.text import Text

from distexp.tables.columns import GAP, empty_table, split_widths

MIN_GAP = 1
SHORT_TEXT = 7  # characters of a text that is kept in one line

NOT_MEASURED = "-"  # cell of a value that a run does not have


@dataclass(frozen=True)
class TextTable:
    """A small table of texts. Cells such as ``invalid [1]`` refer to its reasons; the first columns name the rows."""

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
        """Build a table from its columns by header. A column without any value is left out."""
        kept = {header: cells for header, cells in columns.items() if set(cells) != {NOT_MEASURED}}
        labels = [header for header in list(columns)[:num_labels] if header in kept]
        return cls(title, tuple(kept), tuple(zip(*kept.values(), strict=True)), note, num_labels=len(labels))


def render_text_table(table: TextTable, width: int) -> RenderResult:
    """Yield the title, the table and its notes."""
    columns = [list(column) for column in zip(table.header, *table.rows, strict=True)]
    words = [_longest_word(column) for column in columns]
    blocks = split_widths(words, table.num_labels, MIN_GAP, width)
    yield Text(f"\n{table.title}\n", style="bold")
    for block in blocks:
        yield _render_block([columns[index] for index in block], [words[index] for index in block], width)
        yield Text("")
    for text in (*table.reasons, table.note):
        if text:
            yield Text(text, style="dim")


def without_wide_labels(table: TextTable, width: int) -> TextTable:
    """Return a table without its last labels if they need more than half of the width, and name them below it.

    The first label always stays. Otherwise each block of columns repeats many labels, and none is readable.
    """
    words = [_longest_word(column) + MIN_GAP for column in zip(table.header, *table.rows, strict=True)]
    kept = next((n for n in range(table.num_labels, 1, -1) if sum(words[:n]) <= width // 2), 1)
    if kept == table.num_labels:
        return table
    header, *rows = ((*row[:kept], *row[table.num_labels :]) for row in (table.header, *table.rows))
    hidden = f"Hidden columns (terminal too narrow): {', '.join(table.header[kept : table.num_labels])}."
    return replace(
        table, header=header, rows=tuple(rows), num_labels=kept, note=" ".join(filter(None, (table.note, hidden)))
    )


def _render_block(columns: Sequence[Sequence[str]], words: Sequence[int], width: int) -> Table:
    gap, widths = _column_widths(columns, words, width)
    table = empty_table(gap)
    for (title, *_), column_width in zip(columns, widths, strict=True):
        table.add_column(Text(title), vertical="bottom", overflow="fold", width=column_width)
    for cells in list(zip(*columns, strict=True))[1:]:
        table.add_row(*map(Text, cells))
    return table


def _column_widths(
    columns: Sequence[Sequence[str]], words: Sequence[int], width: int
) -> tuple[int, Sequence[int | None]]:
    """Return the space between columns, smaller on a narrow terminal, and their widths; None leaves it to rich."""
    full = [max(map(cell_len, column)) for column in columns]
    for gap in (GAP, MIN_GAP):
        spare = width - sum(words) - gap * (len(columns) - 1)
        if spare >= 0:
            return gap, _widen(words, [max(map(cell_len, column[1:])) for column in columns], full, spare)
    return MIN_GAP, [None] * len(columns)


def _widen(minimum: Sequence[int], cells: Sequence[int], full: Sequence[int], spare: int) -> list[int]:
    """Widen the columns whose cells wrap, then those whose titles wrap; first those that lack most."""
    widths = list(minimum)
    for _ in range(min(spare, sum(full) - sum(minimum))):
        missing = ((max(0, cells[n] - width), full[n] - width, n) for n, width in enumerate(widths))
        _, _, column = max(missing)
        widths[column] += 1
    return widths


def _longest_word(texts: Sequence[str]) -> int:
    """Return the characters of the longest word; a short text such as ``no GPU`` counts as one word."""
    pieces = (piece for text in texts for piece in ([text] if cell_len(text) <= SHORT_TEXT else text.split()))
    return max(map(cell_len, pieces))

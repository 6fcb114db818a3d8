"""Tables of exercises on a terminal.

Titles and cells wrap between words if the terminal is narrow. Columns that do not fit continue below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from distexp.report.columns import GAP, split_widths
from distexp.report.data.overview import Overview
from distexp.report.data.text_table import TextTable
from distexp.report.exercises import exercise_tables
from distexp.runs.record import RunRecord

MIN_GAP = 1
WORKSHOP = "The workshop explains the exercises: docs/workshop.md"
SHORT_TEXT = 7  # characters of a text that is kept in one line


@dataclass(frozen=True)
class ExerciseTables:
    """Tables of the exercises that the runs belong to."""

    overview: Overview

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if all(row.record.status == "invalid" for row in self.overview.rows):
            return  # the notes on the runs list the errors already
        tables = list(exercise_tables(self.overview))
        for table in tables:
            yield from render_text_table(table, console.width)
        if tables:
            yield Text(WORKSHOP, style="dim")


def build_exercise_tables(records: Sequence[RunRecord]) -> ExerciseTables:
    """Return the tables of exercises, as printed after a single run."""
    return ExerciseTables(Overview.from_records(records))


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
    """Return a table of columns, each of which starts with its title."""
    gap, widths = _column_widths(columns, words, width)
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False)
    for (title, *_), column_width in zip(columns, widths, strict=True):
        table.add_column(Text(title), vertical="bottom", overflow="fold", width=column_width)
    for cells in list(zip(*columns, strict=True))[1:]:
        table.add_row(*map(Text, cells))
    return table


def _column_widths(
    columns: Sequence[Sequence[str]], words: Sequence[int], width: int
) -> tuple[int, Sequence[int | None]]:
    """Return the space between columns and their widths; None leaves it to rich.

    A narrow terminal gets smaller gaps. A word is broken only if it is too long for the terminal.
    """
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

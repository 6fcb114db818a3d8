"""Tables of exercises on a terminal; titles and cells wrap if it is narrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from distexp.report.columns import GAP
from distexp.report.data.overview import Overview
from distexp.report.data.text_table import TextTable
from distexp.report.exercises import exercise_tables
from distexp.runs.record import RunRecord


@dataclass(frozen=True)
class ExerciseTables:
    """Tables of the exercises that the runs belong to."""

    overview: Overview

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if all(row.record.status == "invalid" for row in self.overview.rows):
            return  # the notes on the runs list the errors already
        for table in exercise_tables(self.overview):
            yield from _render(table, console.width)


def build_exercise_tables(records: Sequence[RunRecord]) -> ExerciseTables:
    """Return the tables of exercises, as printed after a single run."""
    return ExerciseTables(Overview.from_records(records))


def _render(table: TextTable, width: int) -> RenderResult:
    gap, widths = _column_widths(table, width)
    rendered = Table(
        box=box.SIMPLE_HEAD, header_style="bold", padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False
    )
    for title, column_width in zip(table.header, widths, strict=True):
        rendered.add_column(Text(title), vertical="bottom", overflow="fold", width=column_width)
    for cells in table.rows:
        rendered.add_row(*map(Text, cells))
    yield Text(f"\n{table.title}\n", style="bold")
    yield rendered
    if table.note:
        yield Text(f"\n{table.note}", style="dim")


def _column_widths(table: TextTable, width: int) -> tuple[int, list[int | None]]:
    """Return the space between columns and their widths; None leaves it to rich.

    A narrow terminal first gets smaller gaps, then broken words in titles. Words in cells are broken last.
    """
    columns = [list(column) for column in zip(*table.rows, strict=True)]
    full = [max(map(cell_len, [title, *cells])) for title, cells in zip(table.header, columns, strict=True)]
    words = [_longest_word([title, *cells]) for title, cells in zip(table.header, columns, strict=True)]
    cell_words = [_longest_word(cells) for cells in columns]
    for gap, minimum in ((GAP, words), (1, words), (1, cell_words)):
        spare = width - sum(minimum) - gap * (len(columns) - 1)
        if spare >= 0:
            return gap, [*_widen(minimum, words, full, spare)]
    return 1, [None] * len(columns)


def _widen(minimum: Sequence[int], words: Sequence[int], full: Sequence[int], spare: int) -> list[int]:
    """Widen columns with broken words first, then those that lack most."""
    widths = list(minimum)
    for _ in range(min(spare, sum(full) - sum(minimum))):
        missing = [(max(0, words[n] - width), full[n] - width, n) for n, width in enumerate(widths)]
        _, _, column = max(missing)
        widths[column] += 1
    return widths


def _longest_word(texts: Sequence[str]) -> int:
    return max(cell_len(word) for text in texts for word in text.split() or [""])

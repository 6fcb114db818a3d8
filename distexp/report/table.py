"""Tables on a terminal, as wide as it is: the least important columns go first, and are named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from distexp.report.data.overview import Overview
from distexp.report.data.repeats import RunGroup, format_metric
from distexp.report.data.settings import format_setting
from distexp.report.data.text_table import TextTable
from distexp.report.exercises import exercise_tables
from distexp.report.summary import summarize
from distexp.runs.record import FAILURES, RunRecord

GAP = 2  # blanks between two columns, one of them the box's own
MOST_ROWS = 200  # on a terminal
LONGEST_VALUE = 24  # of a setting, in characters
ALWAYS = 1000
SETTINGS = (ALWAYS - 2, 94, 92, 88)
"""How important the first settings are, beside the figures'; the others go before any figure."""
NOTES = 20


@dataclass(frozen=True)
class Column:
    """A column of plain texts; ``title`` may have several lines."""

    title: str
    cells: tuple[str, ...]
    importance: int
    right: bool = True

    @property
    def width(self) -> int:
        """Characters on the terminal."""
        return max(cell_len(line) for text in (self.title, *self.cells) for line in text.split("\n"))

    @property
    def one_line_title(self) -> str:
        """The title in one line."""
        joined = self.title.replace("-\n", "").replace("_\n", "_").replace(".\n", ".")
        return joined.replace("\n", " ")


def heading(name: str) -> str:
    """The name of a setting, broken where it may be."""
    return name.replace(".", ".\n").replace("_", "_\n")


def fit_columns(columns: Sequence[Column], width: int) -> tuple[list[Column], list[Column]]:
    """The columns that fit into a width, and those that had to go, the least important first."""
    kept, dropped = list(columns), []
    while len(kept) > 1 and sum(column.width + GAP for column in kept) - GAP > width:
        least = min(reversed(kept), key=lambda column: column.importance)
        kept.remove(least)
        dropped.append(least)
    for column in reversed(dropped[:]):  # a wide one may have left room for narrower ones
        with_it = [each for each in columns if each in kept or each is column]
        if sum(each.width + GAP for each in with_it) - GAP <= width:
            kept = with_it
            dropped.remove(column)
    return kept, dropped


def build_table(columns: Sequence[Column], styles: Sequence[str] = ()) -> Table:
    """A table of columns as they are; ``styles`` colours the rows' status."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, GAP - 1, 0, 0), pad_edge=False,
                  show_edge=False)  # fmt: skip
    for column in columns:
        table.add_column(Text(column.title), justify="right" if column.right else "left", no_wrap=True,
                         vertical="bottom")  # fmt: skip
    for index, cells in enumerate(zip(*(column.cells for column in columns), strict=True)):
        texts = [
            Text(cell, style=styles[index] if styles and column.title == "status" else "")
            for cell, column in zip(cells, columns, strict=True)
        ]
        table.add_row(*texts)
    return table


def overview_columns(overview: Overview) -> Iterator[Column]:
    """The columns of the table of runs."""
    groups = overview.groups
    yield Column("run", tuple(group.label for group in groups), ALWAYS)
    if any(len(group.rows) > 1 for group in groups):
        yield Column("n", tuple(str(len(group.counted_rows)) for group in groups), ALWAYS - 1)
    for name, importance in zip(overview.varied, chain(SETTINGS, repeat(0)), strict=False):
        cells = tuple(format_setting(group.setting(name), LONGEST_VALUE) for group in groups)
        yield Column(heading(name), cells, importance, right=False)
    yield Column("status", tuple(group.status for group in groups), ALWAYS, right=False)
    for figure in overview.metrics():
        yield Column(figure.title, format_metric(groups, figure), figure.importance)


def status_style(group: RunGroup) -> str:
    """Green for done, red for a failure, and between them what is a result too."""
    statuses = {row.record.status for row in group.rows}
    if statuses == {"completed"}:
        return "green"
    return "red" if statuses & FAILURES else "yellow" if "invalid" in statuses else "magenta"


@dataclass(frozen=True)
class OverviewTable:
    """The table of runs with its notes and sentences, drawn when its width is known."""

    overview: Overview
    elsewhere: str = "a wider terminal shows them"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        overview = self.overview
        columns = list(overview_columns(overview))
        left_out = len(overview.groups) - MOST_ROWS
        if left_out > 0:
            columns = [Column(c.title, c.cells[:MOST_ROWS], c.importance, c.right) for c in columns]
        kept, dropped = fit_columns(columns, options.max_width)
        yield build_table(kept, [status_style(group) for group in overview.groups])
        yield Text("")
        if left_out > 0:
            yield Text(f"{left_out} more rows are not shown here.", style="dim")
        if dropped:
            names = ", ".join(column.one_line_title for column in sorted(dropped, key=columns.index))
            yield Text(f"Left out for want of width: {names} ({self.elsewhere}).", style="dim")
        notes = list(overview.notes())
        for note in notes[:NOTES]:
            yield Text(note, style="yellow")
        if len(notes) > NOTES:
            yield Text(f"{len(notes) - NOTES} more reasons are not shown here.", style="dim")
        for sentence in summarize(overview):
            yield Text(sentence)
        yield ExerciseTables(overview)


@dataclass(frozen=True)
class ExerciseTables:
    """The own tables of the exercises among some runs."""

    overview: Overview

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if all(row.record.status == "invalid" for row in self.overview.rows):
            return  # why is said above, once
        for table in exercise_tables(self.overview):
            yield from _exercise(table, console)


def _exercise(table: TextTable, console: Console) -> RenderResult:
    """An exercise's own table; titles and cells are wrapped where the terminal is narrow."""
    gap, widths = _layout(table, console.width)
    drawing = Table(
        box=box.SIMPLE_HEAD, header_style="bold", padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False
    )
    for title, width in zip(table.header, widths, strict=True):
        drawing.add_column(Text(title), vertical="bottom", overflow="fold", width=width)
    for cells in table.rows:
        drawing.add_row(*map(Text, cells))
    yield Text(f"\n{table.title}\n", style="bold")
    yield drawing
    if table.note:
        yield Text(f"\n{table.note}", style="dim")


def _layout(table: TextTable, width: int) -> tuple[int, list[int | None]]:
    """Blanks between columns, and their widths: a word is broken only where it must be, a title's before a cell's."""
    titles, cells = [[title] for title in table.header], [list(column) for column in zip(*table.rows, strict=True)]
    whole = [max(map(cell_len, title + column)) for title, column in zip(titles, cells, strict=True)]
    words = [_longest_word(title + column) for title, column in zip(titles, cells, strict=True)]
    for gap, least in ((GAP, words), (1, words), (1, list(map(_longest_word, cells)))):
        spare = width - sum(least) - gap * (len(whole) - 1)
        if spare >= 0:
            break
    else:
        return 1, [None] * len(whole)
    widths = list(least)
    for _ in range(min(spare, sum(whole) - sum(least))):
        lacking = [(max(0, words[n] - have), whole[n] - have, n) for n, have in enumerate(widths)]
        widths[max(lacking)[-1]] += 1
    return gap, [*widths]


def _longest_word(texts: Sequence[str]) -> int:
    return max(cell_len(word) for text in texts for word in text.split() or [""])


def build_exercise_tables(records: Sequence[RunRecord]) -> ExerciseTables:
    """The tables of the exercises alone, as after a single run."""
    return ExerciseTables(Overview.from_records(records))


def build_overview_table(records: Sequence[RunRecord]) -> OverviewTable:
    """A row a run: what was varied, what became of it, its figures, and what they say."""
    return OverviewTable(Overview.from_records(records))

"""Columns of terminal tables, of which narrow terminals hide the least important ones, and small tables of texts."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from distexp.exceptions import printable
from distexp.system.silence import allows_live_lines

GAP = 2  # spaces between two columns; one of them is part of rich's box
ALWAYS = 1000  # importance of a required column, which is never hidden
PIPED_WIDTH = 240  # characters, if the output is not a terminal
STACKED_ROWS, MAX_BLOCKS = 12, 3  # of a table whose columns continue below
MIN_CELLS = 20  # number of cells from which a bar is shown; fewer take less than a second


@dataclass(frozen=True)
class Column:
    """A column of texts. Its title may have several lines. Columns of low importance are hidden first."""

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
        """Header in one line."""
        joined = self.title.replace("-\n", "").replace("_\n", "_").replace(".\n", ".")
        return joined.replace("\n", " ")

    def first_rows(self, count: int) -> Column:
        """Return the column with its first cells only."""
        return Column(self.title, self.cells[:count], self.importance, self.right)


def cell(value: float | None, shown: str | Callable[[float], str]) -> str:
    """Return a number by a format such as ``,.2f``, or by a function; a dash if it is unknown."""
    if value is None:
        return "-"
    return format(value, shown) if isinstance(shown, str) else shown(value)


def setting_title(name: str) -> str:
    """Return the name of a setting with line breaks after its dots and underscores."""
    return name.replace(".", ".\n").replace("_", "_\n")


def fit_columns(columns: Sequence[Column], width: int) -> tuple[list[Column], list[Column]]:
    """Return the required columns with those that fit into a width, and the hidden ones in their order."""
    kept, hidden = list(columns), []
    while _total_width(kept) > width and any(column.importance < ALWAYS for column in kept):
        least = min(reversed(kept), key=lambda column: column.importance)
        kept.remove(least)
        hidden.append(least)
    for column in reversed(hidden[:]):  # hiding a wide column may have made room for narrower ones
        with_column = [candidate for candidate in columns if candidate in kept or candidate is column]
        if _total_width(with_column) <= width:
            kept = with_column
            hidden.remove(column)
    return kept, sorted(hidden, key=columns.index)


def arrange_columns(columns: Sequence[Column], width: int) -> tuple[list[list[Column]], list[Column]]:
    """Return the columns in blocks that fit into a width, one below the other, and those that are hidden.

    The first block has the most important columns. A short table continues below it, a long one hides the others.
    """
    kept, hidden = fit_columns(columns, width)
    blocks = split_columns(kept, width)
    others = [column for column in hidden if column is not columns[0]]
    more = split_columns([columns[0], *others], width) if others else []
    is_short = len(columns[0].cells) <= STACKED_ROWS and len(blocks) + len(more) <= MAX_BLOCKS
    return (blocks + more, []) if is_short else (blocks, hidden)


def split_columns(columns: Sequence[Column], width: int) -> list[list[Column]]:
    """Return the columns in blocks that fit into a width; each starts with the first column."""
    blocks = split_widths([column.width for column in columns], 1, GAP, width)
    return [[columns[index] for index in block] for block in blocks]


def split_widths(widths: Sequence[int], num_labels: int, gap: int, width: int) -> list[list[int]]:
    """Return the indices of columns in blocks that fit into a width. Each has the labels, and another column."""
    labels = list(range(num_labels))
    room = width - sum(widths[:num_labels]) - gap * num_labels
    blocks, used = [labels.copy()], 0
    for index in range(num_labels, len(widths)):
        if len(blocks[-1]) > num_labels and used + widths[index] > room:
            blocks.append(labels.copy())
            used = 0
        blocks[-1].append(index)
        used += widths[index] + gap
    return blocks


def _total_width(columns: Sequence[Column]) -> int:
    return sum(column.width + GAP for column in columns) - GAP


def hidden_columns_note(hidden: Sequence[Column], hint: str) -> Text:
    """Return the line below a table that lists its hidden columns."""
    names = ", ".join(column.one_line_title for column in hidden)
    return Text(f"Hidden columns (terminal too narrow): {names}. {hint}", style="dim")


def empty_table(gap: int = GAP) -> Table:
    """Return a table without columns, in the style of all tables, with some spaces between two columns."""
    return Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False)


def fitted_table(columns: Sequence[Column], width: int, hint: str) -> list[Table | Text]:
    """Return the columns as tables that fit into a width, and the line that lists the hidden ones, if any.

    The first column names the rows. On a narrow terminal its texts continue in further lines, so that others fit.
    """
    lines = tuple(textwrap.fill(text, max(1, width // 2), break_on_hyphens=False) for text in columns[0].cells)
    blocks, hidden = arrange_columns([replace(columns[0], cells=lines), *columns[1:]], width)
    tables = [part for block in blocks for part in (build_table(block), Text(""))][:-1]
    return [*tables, *([hidden_columns_note(hidden, hint)] if hidden else [])]


def build_table(columns: Sequence[Column], status_styles: Sequence[str] = ()) -> Table:
    """Return a rich table; ``status_styles`` has the color of each row's status."""
    table = empty_table()
    for column in columns:
        table.add_column(Text(column.title), justify="right" if column.right else "left", no_wrap=True,
                         vertical="bottom")  # fmt: skip
    for index, cells in enumerate(zip(*(column.cells for column in columns), strict=True)):
        texts = [
            Text(cell, style=status_styles[index] if status_styles and column.title == "status" else "")
            for cell, column in zip(cells, columns, strict=True)
        ]
        table.add_row(*texts)
    return table


class SafeConsole(Console):
    """A console that shows control characters, as in the name of a folder, and does not obey them."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of a renderable. Styles are not in their texts."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def make_console(piped_width: int = PIPED_WIDTH) -> Console:
    """Return a console as wide as the terminal, or as COLUMNS; without both, as ``piped_width``."""
    console = SafeConsole(emoji=False)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return SafeConsole(width=piped_width, emoji=False)


def print_plain(console: Console, text: str, style: str | None = None) -> None:
    """Print a text exactly as it is: rich would style numbers, wrap paths, and replace ``[...]`` and ``:name:``."""
    console.print(text, style=style, highlight=False, markup=False, emoji=False, soft_wrap=True)


def shows_live_lines(console: Console) -> bool:
    """Return whether lines may be overwritten: on a terminal, unless the user wants plain ones."""
    return console.is_terminal and not console.is_dumb_terminal and allows_live_lines()


@contextmanager
def live_display(console: Console) -> Iterator[Callable[[RenderableType], None] | None]:
    """Yield a function that shows something below the output of a terminal until the block ends; None for plain lines.

    Other output appears above. No thread refreshes it, because processes are forked while it is shown.
    """
    if not shows_live_lines(console):
        yield None
        return
    from rich.live import Live

    with Live(console=console, transient=True, auto_refresh=False) as live:
        yield lambda shown: live.update(shown, refresh=True)


@contextmanager
def show_progress(step: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar on stderr until the block ends, if stderr is a terminal; yield a function to call after each cell."""
    if total < MIN_CELLS:
        yield lambda: None
        return
    from rich.console import Console  # A single run needs none of this before its workers start.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not shows_live_lines(console):
        yield lambda: None
        return
    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Without a thread that refreshes the bar, because processes are forked while it is shown.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task(step, total=total)
        progress.refresh()

        def advance() -> None:
            progress.advance(task)
            if progress.tasks[0].completed % max(1, total // 100) == 0:
                progress.refresh()

        yield advance


# Small tables of texts, for the terminal, the page and ``results.md``.
#
# On a terminal, titles and cells wrap between words if it is narrow. Columns that do not fit continue below.


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

"""``results.md``: the table of runs, the notes and summary, and the figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from distexp.report.data.overview import Overview
from distexp.report.exercises import exercise_tables
from distexp.report.figures.base import Figure
from distexp.report.overview_table import overview_columns
from distexp.report.summary import summarize


def write_markdown(overview: Overview, figures: Sequence[Figure], path: Path) -> None:
    """Write the report as Markdown; the images are expected in the folder ``plots``."""
    lines = [*_overview_lines(overview)]
    for table in exercise_tables(overview):
        lines += ["", f"## {table.title}", "", *_table(table.header, table.rows)]
        lines += [*(_escape(reason) + "  " for reason in table.reasons), _escape(table.note)]
    for figure in figures:
        lines += _figure_lines(figure)
    path.write_text("\n".join(lines) + "\n")


def _overview_lines(overview: Overview) -> Iterator[str]:
    columns = list(overview_columns(overview))
    rows = zip(*(column.cells for column in columns), strict=True)
    yield from _table([column.one_line_title for column in columns], rows, [column.right for column in columns])
    yield from (f"- {_escape(note)}" for note in overview.notes())
    yield ""
    yield from (_escape(sentence) + "  " for sentence in summarize(overview))


def _figure_lines(figure: Figure) -> Iterator[str]:
    yield from ("", f"## {figure.title}", "")
    if figure.subtitle:
        yield from (f"**{_escape(figure.subtitle)}**", "")
    if figure.panels:
        yield from (f"![{figure.title}](plots/{figure.name}.svg)", "")
    yield from (_escape(figure.caption), "")
    for table in figure.tables:
        yield from (f"{table.title}:", "", *_table(table.header, table.rows))
    yield from (f"- {_escape(sentence)}" for sentence in figure.sentences)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[bool] = ()) -> list[str]:
    """Return the lines of a table; ``right`` has whether a column is right-aligned."""
    ruler = ["---:" if n < len(right) and right[n] else "---" for n in range(len(header))]
    return [_line(header), _line(ruler), *map(_line, rows), ""]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_escape(cell) for cell in cells)} |"


def _escape(text: str) -> str:
    return " ".join(text.splitlines()).replace("|", "\\|").replace("<", "&lt;")

"""Terminal table of runs, with notes on failures and a summary below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from distexp.report.data.memory_parts import build_parts_table, has_small_parts
from distexp.report.data.overview import Overview
from distexp.report.data.repeats import RunGroup, format_metric
from distexp.report.data.rows import rows_from_records
from distexp.report.data.settings import MAX_LENGTH, format_setting
from distexp.report.exercises import exercise_tables, quiz_columns
from distexp.report.same_training import describe_same_training
from distexp.report.summary import summarize
from distexp.runs.record import FAILURES, RunRecord
from distexp.tables.columns import (
    ALWAYS,
    Column,
    build_table,
    fit_columns,
    hidden_columns_note,
    setting_title,
    split_columns,
)
from distexp.tables.text_table import render_text_table, without_wide_labels

MAX_ROWS = 200  # on a terminal
MAX_NOTES = 20
WORKSHOP = "The workshop explains the exercises: docs/workshop.md"
SETTING_IMPORTANCE = (ALWAYS - 2, 94, 92, 88)
"""Importance of the first settings, relative to the metrics; the others are hidden before any metric."""


@dataclass(frozen=True)
class OverviewTable:
    """Table of runs for a terminal of any width.

    Attributes:
        results: File with all columns and rows; None if none was written.
    """

    overview: Overview
    results: Path | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        overview = self.overview
        columns = [column.first_rows(MAX_ROWS) for column in overview_columns(overview)]
        kept, hidden = fit_columns(columns, options.max_width)
        for block in split_columns(kept, options.max_width):
            yield build_table(block, [status_style(group) for group in overview.groups])
            yield Text("")
        more_rows = len(overview.groups) - MAX_ROWS
        if more_rows > 0:
            yield Text(f"{more_rows} more rows are {self._where}.", style="dim")
        if hidden:
            yield hidden_columns_note(hidden, f"All columns are in {self.results}." if self.results else "")
        yield from _notes(overview)
        yield from map(Text, describe_same_training(overview))
        for sentence in summarize(overview, hidden={column.title for column in hidden}):
            yield Text(sentence)
        yield ExerciseTables(overview)
        parts = build_parts_table(overview) if has_small_parts(overview) else None
        if parts is not None:
            yield from render_text_table(without_wide_labels(parts, options.max_width), options.max_width)

    @property
    def _where(self) -> str:
        return f"in {self.results}" if self.results else "not shown"


@dataclass(frozen=True)
class ExerciseTables:
    """Tables of the exercises that the runs belong to, on a terminal."""

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


def build_overview_table(records: Sequence[RunRecord], sweep_dir: Path | None = None) -> OverviewTable:
    """Return the table of some runs, as printed after a sweep.

    Args:
        records: The records of the runs.
        sweep_dir: Directory of the sweep. Without it, the losses are not compared.
    """
    return OverviewTable(Overview.from_rows(rows_from_records(records, sweep_dir)))


def overview_columns(overview: Overview) -> Iterator[Column]:
    """Yield the columns: run, number of repeats, varying settings, status and metrics.

    Columns that a quiz of the workshop asks for are required.
    """
    groups, quiz = overview.groups, quiz_columns(overview)
    yield Column("run", tuple(group.label for group in groups), ALWAYS)
    if any(len(group.rows) > 1 for group in groups):
        yield Column("n", tuple(str(len(group.counted_rows)) for group in groups), ALWAYS - 1)
    for name, importance in zip(overview.varied, chain(SETTING_IMPORTANCE, repeat(0)), strict=False):
        cells = tuple(format_setting(group.setting(name), MAX_LENGTH) for group in groups)
        yield Column(setting_title(name), cells, ALWAYS if name in quiz else importance, right=False)
    yield Column("status", tuple(group.status for group in groups), ALWAYS, right=False)
    for metric in overview.metrics():
        marks = (overview.mark(metric.name, group) for group in groups)
        cells = tuple(cell + mark for cell, mark in zip(format_metric(groups, metric), marks, strict=True))
        yield Column(metric.title, cells, ALWAYS if metric.name in quiz else metric.importance)


def status_style(group: RunGroup) -> str:
    """Return the color of a status: green for completed, red for failures."""
    statuses = {row.record.status for row in group.rows}
    if statuses == {"completed"}:
        return "green"
    return "red" if statuses & FAILURES else "yellow" if "invalid" in statuses else "magenta"


def _notes(overview: Overview) -> Iterator[Text]:
    notes = list(overview.notes())
    for note in notes[:MAX_NOTES]:
        yield Text(note, style="yellow")
    if len(notes) > MAX_NOTES:
        yield Text(f"{len(notes) - MAX_NOTES} more errors are not shown.", style="dim")

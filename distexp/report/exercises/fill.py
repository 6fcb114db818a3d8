"""Fills the layout of a table with the runs of an exercise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from distexp.report.data.overview import Overview
from distexp.report.data.repeats import RunGroup
from distexp.report.data.settings import format_settings
from distexp.report.exercises.columns import Reasons, format_row
from distexp.report.exercises.layout import Layout, RowKey
from distexp.report.exercises.notes import describe_scale, table_notes
from distexp.tables.text_table import TextTable

PRINTED = "printed in the workshop"
MAX_SETTINGS = 4  # in the label of a row


@dataclass(frozen=True)
class TableRow:
    """A row of a table: one label for each column of the header, and one cell for each column of the layout."""

    labels: tuple[str, ...]
    cells: tuple[str, ...]


def fill_table(exercise: str, layout: Layout, overview: Overview, groups: Sequence[RunGroup]) -> TextTable:
    """Build the table of an exercise. Rows of the workshop without a run are marked ``not run``."""
    keyed = _assign_rows(layout, groups)
    baseline = next((group for key, group in keyed if key == layout.keys[0] and group and group.completed), None)
    counts = Counter(key for key, _ in keyed)
    rows: list[TableRow] = []
    reasons = Reasons()
    for key, group in keyed:
        labels = layout.labels_of(key)
        if group is not None and counts[key] > 1:
            labels = (labels[0] + _differing_settings(overview, group), *labels[1:])
        rows.append(TableRow(labels, format_row(layout.columns, group, baseline, reasons)))
        if layout.printed and key == layout.keys[0]:
            rows.append(_printed_row(layout))
    note = " ".join(filter(None, [describe_scale(groups), *table_notes(layout, groups)]))
    build = _build_transposed if layout.transpose else _build
    table = build(f"{layout.title} ({exercise})", layout, rows)
    return replace(table, note=note, reasons=reasons.numbered())


def _assign_rows(layout: Layout, groups: Sequence[RunGroup]) -> list[tuple[RowKey, RunGroup | None]]:
    """Return the workshop's rows in their order, each with its groups, then the rows of all other groups."""
    found: dict[RowKey, list[RunGroup]] = {}
    for group in groups:
        found.setdefault(layout.key_of(group), []).append(group)
    keys = [*layout.keys, *(key for key in found if key not in layout.keys)]
    if all(len(key) == 1 and isinstance(key[0], int) for key in keys):
        keys.sort()
    assigned: list[tuple[RowKey, RunGroup | None]] = []
    for key in keys:
        assigned += [(key, group) for group in found.get(key, [None])]
    return assigned


def _differing_settings(overview: Overview, group: RunGroup) -> str:
    settings = format_settings(group.settings, overview.varied[:MAX_SETTINGS])
    return f", {settings or f'run {group.label}'}"


def _printed_row(layout: Layout) -> TableRow:
    """Return the row of the numbers that the workshop printed."""
    labels = (PRINTED, *[""] * (len(layout.label) - 1))
    return TableRow(labels, tuple(layout.printed.get(column.title, "") for column in layout.columns))


def _build(title: str, layout: Layout, rows: Sequence[TableRow]) -> TextTable:
    header = (*layout.header, *(column.title for column in layout.columns))
    texts = tuple((*row.labels, *row.cells) for row in rows)
    return TextTable(title, header, texts, num_labels=len(layout.header))


def _build_transposed(title: str, layout: Layout, rows: Sequence[TableRow]) -> TextTable:
    """Build a table with a row for each column of the layout, and a column for each run."""
    has_categories = any(column.category for column in layout.columns)
    corner = ("Category", "Metric") if has_categories else ("Metric",)
    titles = [(column.category, column.title) if has_categories else (column.title,) for column in layout.columns]
    texts = tuple((*row_title, *(row.cells[n] for row in rows)) for n, row_title in enumerate(titles))
    return TextTable(title, (*corner, *(row.labels[0] for row in rows)), texts, num_labels=len(corner))

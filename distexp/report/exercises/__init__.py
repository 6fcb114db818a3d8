"""The workshop's results tables, filled from the records.

``workshop.yaml`` describes the tables. A preset chooses one with the key ``exercise``.
"""

from __future__ import annotations

from collections.abc import Iterator

from distexp.report.data.overview import Overview
from distexp.report.exercises.fill import fill_table
from distexp.report.exercises.layout import load_layouts
from distexp.tables.text_table import TextTable


def quiz_columns(overview: Overview) -> frozenset[str]:
    """Return the names of the settings and metrics that the quizzes of the exercises ask for."""
    layouts = load_layouts()
    exercises = {str(row.record.config.get("exercise")) for row in overview.rows}
    return frozenset(name for exercise in exercises & layouts.keys() for name in layouts[exercise].quiz)


def exercise_tables(overview: Overview) -> Iterator[TextTable]:
    """Yield the table of every exercise among the runs."""
    for exercise in dict.fromkeys(row.record.config.get("exercise") for row in overview.rows):
        if exercise is None:
            continue
        groups = [group for group in overview.groups if group.rows[0].record.config.get("exercise") == exercise]
        layout = load_layouts().get(exercise)
        if layout is not None:
            yield fill_table(exercise, layout, overview, groups)

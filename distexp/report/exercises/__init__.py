"""Each exercise's own results table, as the workshop prints it, filled from the records.

``layouts`` says what the tables look like, ``cells`` reads and words what stands in them, ``filling`` puts both
together.
"""

from __future__ import annotations

from collections.abc import Iterator

from distexp.report.data.overview import Overview
from distexp.report.data.text_table import TextTable
from distexp.report.exercises.filling import fill
from distexp.report.exercises.layouts import LAYOUTS


def exercise_tables(overview: Overview) -> Iterator[TextTable]:
    """The tables of every exercise among the runs, by the key ``exercise`` of their configurations."""
    for exercise in dict.fromkeys(row.record.config.get("exercise") for row in overview.rows):
        groups = [group for group in overview.groups if group.rows[0].record.config.get("exercise") == exercise]
        if exercise in LAYOUTS:
            yield fill(exercise, LAYOUTS[exercise], overview, groups)

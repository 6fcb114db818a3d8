"""Sentences about ranks that are slower than the others of their run, or have a problem."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distexp.report.data.rows import Row
from distexp.runs.listing import format_count
from distexp.runs.straggler_text import describe_straggler

MAX_STRAGGLERS = 8


def describe_stragglers(rows: Sequence[Row]) -> Iterator[str]:
    """Yield each such rank with the evidence, and the number of those that are left out."""
    found = [(row, entry) for row in rows for entry in row.record.metrics.stragglers or ()]
    for row, entry in found[:MAX_STRAGGLERS]:
        text = describe_straggler(entry)
        yield f"In run {row.label}, {text[0].lower()}{text[1:].rstrip('.')}."
    if len(found) > MAX_STRAGGLERS:
        yield f"{format_count(len(found) - MAX_STRAGGLERS, 'more slow rank')} are in the records."

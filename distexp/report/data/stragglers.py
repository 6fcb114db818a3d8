"""Sentences about ranks that are slower than the others of their run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distexp.report.data.rows import Row
from distexp.runs.checked_values import number_of, texts_of

MOST_STRAGGLERS = 8


def describe_stragglers(rows: Sequence[Row]) -> Iterator[str]:
    """Yield each slow rank with the evidence, and the number of those that are left out."""
    found = [(row, entry) for row in rows for entry in row.record.metrics.stragglers or ()]
    for row, entry in found[:MOST_STRAGGLERS]:
        yield f"Straggler in run {row.label}: rank {entry.get('rank')}{_place(entry)}{_delay(entry)}{_evidence(entry)}."
    if len(found) > MOST_STRAGGLERS:
        yield f"{len(found) - MOST_STRAGGLERS} more stragglers are in the records."


def _place(entry: Mapping[str, Any]) -> str:
    gpu, host = entry.get("gpu"), entry.get("host")
    parts = ["" if gpu is None else f"GPU {gpu}", f"on {host}" if host else ""]
    known = " ".join(filter(None, parts))
    return f" ({known})" if known else ""


def _delay(entry: Mapping[str, Any]) -> str:
    percent = number_of(entry, "slower_by_pct")
    return " has a problem" if percent is None else f" is {percent:.0f}% slower than the others"


def _evidence(entry: Mapping[str, Any]) -> str:
    text = "; ".join(texts_of(entry, "evidence"))
    return f": {text.rstrip('.')}" if text else ""

"""Slow ranks of a record as sentences, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distexp.runs.entry_values import number_of, texts_of


def describe_straggler(entry: Mapping[str, Any]) -> str:
    """Return an entry of ``metrics.stragglers`` as a sentence without its period.

    For example: ``Rank 3 (GPU 3 of node07) is 12% slower: its SM clock is 1,200 MHz, that of the others 1,755 MHz``.
    """
    places = [f"GPU {entry['gpu']}" if entry.get("gpu") is not None else None, entry.get("host")]
    place = " of ".join(str(each) for each in places if each is not None)
    slower = number_of(entry, "slower_by_pct")
    up_to = "up to " if entry.get("is_upper_bound") is True else ""
    verb = "has a problem" if slower is None else f"is {up_to}{slower:.0f}% slower"
    evidence = "; ".join(texts_of(entry, "evidence"))
    return f"Rank {entry.get('rank')}{f' ({place})' if place else ''} {verb}{f': {evidence}' if evidence else ''}"

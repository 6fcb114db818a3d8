"""Slow ranks of a record as sentences, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distexp.runs.entry_values import number_of, texts_of


def describe_straggler(entry: Mapping[str, Any]) -> str:
    """Return an entry of ``metrics.stragglers`` as a sentence without its period.

    For example: ``Rank 3 (GPU 3 of node07) is 12% slower: its SM clock is 1,200 MHz, that of the others 1,755 MHz``.
    """
    rank, place = f"Rank {entry.get('rank')}", _place(entry)
    subject = f"{rank} ({place})" if place else rank
    evidence = "; ".join(texts_of(entry, "evidence"))
    return f"{subject} {_problem(entry)}: {evidence}" if evidence else f"{subject} {_problem(entry)}"


def _place(entry: Mapping[str, Any]) -> str:
    """Return GPU and host of a rank, as far as they are known: ``GPU 3 of node07``."""
    gpu, host = entry.get("gpu"), entry.get("host")
    parts = [None if gpu is None else f"GPU {gpu}", None if host is None else str(host)]
    return " of ".join(filter(None, parts))


def _problem(entry: Mapping[str, Any]) -> str:
    """Return by how much a rank is slower: ``is 12% slower``; without a number ``has a problem``."""
    slower_pct = number_of(entry, "slower_by_pct")
    if slower_pct is None:
        return "has a problem"
    up_to = "up to " if entry.get("is_upper_bound") is True else ""
    return f"is {up_to}{slower_pct:.0f}% slower"

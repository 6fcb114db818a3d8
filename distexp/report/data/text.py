"""Helpers for the sentences of a report."""

from __future__ import annotations

from collections.abc import Iterable


def join_first(names: Iterable[str], limit: int) -> str:
    """Return ``a, b, c and 4 more`` for many names."""
    known = list(names)
    more = len(known) - limit
    return ", ".join(known[:limit]) + (f" and {more} more" if more > 0 else "")

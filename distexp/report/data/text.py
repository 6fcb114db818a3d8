"""Helpers that format the sentences and labels of a report."""

from __future__ import annotations

from collections.abc import Iterable

from distexp.runs.listing import join_first


def name_runs(labels: Iterable[str], limit: int = 4) -> str:
    """Return ``run 3``, or ``runs 3, 5 and 2 more``."""
    known = list(labels)
    return f"run{'s' if len(known) > 1 else ''} {join_first(known, limit)}"


def format_change(after: float, before: float) -> str:
    """Return the relative change as a percentage with its sign, never ``-0.0%``."""
    return f"{round(100 * (after / before - 1), 1) + 0.0:+.1f}%"


def format_noise(noise: float, reference: float) -> str:
    """Return the noise of a value as ``±4%``; large ones are not exact."""
    percent = 100 * noise / abs(reference) if reference else 0.0
    return f"±{percent:.2g}%" if percent < 99.5 else "more than ±100%"

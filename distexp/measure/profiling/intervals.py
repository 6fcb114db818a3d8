"""Arithmetic of time intervals: union, intersection, difference, and lengths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
"""Start and end in seconds."""


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Return the parts of intervals that are inside a window."""
    first, last = window
    return [(max(start, first), min(end, last)) for start, end in intervals if start < last and end > first]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as sorted, disjoint and non-empty intervals."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def total_length(disjoint: Iterable[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - start for start, end in disjoint)


def intersect(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two lists, both sorted and disjoint as from ``merge``."""
    found: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start = max(one[i][0], other[j][0])
        end = min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def intersection_length(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Return the length of the intersection of two lists, both sorted and disjoint as from ``merge``."""
    return total_length(intersect(one, other))


def subtract(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the parts of the first list that are not in the second; both are as from ``merge``."""
    found: list[Interval] = []
    j = 0
    for start, end in one:
        left = start
        while j < len(other) and other[j][1] <= left:
            j += 1
        k = j
        while k < len(other) and other[k][0] < end:
            if other[k][0] > left:
                found.append((left, other[k][0]))
            left = max(left, other[k][1])
            k += 1
        if left < end:
            found.append((left, end))
    return found

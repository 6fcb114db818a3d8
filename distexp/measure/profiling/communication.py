"""Share of communication in training steps, computed from the intervals of collectives and kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Interval = tuple[float, float]
"""Start and end in seconds."""


@dataclass(frozen=True)
class Timeline:
    """Activity of one rank during some steps; all times are in seconds of the same clock."""

    steps: int
    window: Interval  # from the start of the first step to the end of the last
    collectives: Mapping[str, Sequence[Interval]]  # by kind: all_reduce, all_gather, ...
    kernels: Sequence[Interval] | None  # compute kernels on the GPU; None on the CPU


@dataclass(frozen=True)
class CommunicationShares:
    """Communication of one rank."""

    step_s: float  # duration of a profiled step
    share: float  # of that time with at least one collective running or waiting, 0 to 1
    exposed_share: float | None  # the part without any compute kernel; None on the CPU
    by_collective: dict[str, float]  # seconds per step; overlapping kinds count in each


def communication_shares(timeline: Timeline) -> CommunicationShares:
    """Return the share of its steps that a rank spent on communication.

    Raises:
        ValueError: There is no step, or the steps have no duration.
    """
    start, end = timeline.window
    if timeline.steps < 1 or end <= start:
        raise ValueError(f"no duration to compute a share of: {timeline.steps} steps from {start} s to {end} s")
    kinds = {kind: merge(clip(each, timeline.window)) for kind, each in timeline.collectives.items()}
    running = merge(interval for each in kinds.values() for interval in each)
    exposed = None
    if timeline.kernels is not None:
        exposed = total_length(running) - intersection_length(running, merge(clip(timeline.kernels, timeline.window)))
    return CommunicationShares(
        step_s=(end - start) / timeline.steps,
        share=total_length(running) / (end - start),
        exposed_share=None if exposed is None else max(0.0, exposed) / (end - start),
        by_collective={kind: total_length(each) / timeline.steps for kind, each in sorted(kinds.items()) if each},
    )


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


def intersection_length(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Return the length of the intersection of two lists, both sorted and disjoint as from ``merge``."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        start = max(one[i][0], other[j][0])
        end = min(one[i][1], other[j][1])
        total += max(0.0, end - start)
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total

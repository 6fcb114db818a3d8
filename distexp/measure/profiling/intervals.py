"""Time intervals, and the steps that are profiled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distexp.config import TrainConfig

Interval = tuple[float, float]  # start and end in seconds
Spans = list[tuple[Interval, str]]  # intervals with their labels


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


def partition(window: Interval, layers: Iterable[tuple[str, Iterable[Interval]]]) -> tuple[Spans, list[Interval]]:
    """Return the spans of a window that layers cover, and the rest. If layers overlap, the first one counts."""
    left, spans = [window], []
    for label, intervals in layers:
        covered = merge(clip(intervals, window))
        spans += [(interval, label) for interval in intersect(left, covered)]
        left = subtract(left, covered)
    return spans, left


WARMUP_STEPS = 1  # steps before the profiled ones; they contain the start-up cost of the profiler
MIN_EPOCH_STEPS = WARMUP_STEPS + 2  # the first step of an epoch is not profiled either


@dataclass(frozen=True)
class ProfileWindow:
    """The steps that are profiled: the last ones of a training, after the profiler's warm-up."""

    steps_before: int  # steps before the profiler's warm-up
    steps: int

    @classmethod
    def of(cls, train: TrainConfig, *, total: int, per_epoch: int, done: int) -> ProfileWindow | None:
        """Return the window, or None if no step can be profiled.

        The window has ``train.profile_steps`` steps, or fewer: At least half of the steps after
        ``measure_after_step`` remain unprofiled, and no evaluation is between two profiled steps.
        """
        measurable = total - done - train.measure_after_step
        in_last_epoch = total - (total - 1) // per_epoch * per_epoch
        steps = min(train.profile_steps, measurable // 2 - WARMUP_STEPS, in_last_epoch - MIN_EPOCH_STEPS + 1)
        return cls(total - steps - WARMUP_STEPS, steps) if steps >= 1 else None

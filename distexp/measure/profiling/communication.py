"""Which share of training is communication: arithmetic on the intervals in which collectives and kernels ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Interval = tuple[float, float]
"""Begin and end."""


@dataclass(frozen=True)
class Timeline:
    """What one rank did in some steps; all times in seconds, of one clock."""

    steps: int
    window: Interval  # from the begin of the first step to the end of the last
    collectives: Mapping[str, Sequence[Interval]]  # by kind: all_reduce, all_gather, ...
    kernels: Sequence[Interval] | None  # of computing, on the GPU; None where there is no GPU


@dataclass(frozen=True)
class Shares:
    """A rank's communication."""

    step_s: float  # seconds of a step, as profiled
    share: float  # of that time, in which at least one collective ran or waited, from 0 to 1
    exposed_share: float | None  # the part of it in which no kernel computed; None where there is no GPU
    by_collective: dict[str, float]  # seconds a step; kinds that overlap count in each


def shares(timeline: Timeline) -> Shares:
    """How much of its steps a rank spent on communication; what lies outside of them does not count.

    Raises:
        ValueError: there is no step, or none that took any time.
    """
    begin, end = timeline.window
    if timeline.steps < 1 or end <= begin:
        raise ValueError(f"{timeline.steps} steps from {begin} s to {end} s hold nothing to take a share of")
    kinds = {kind: merged(clipped(each, timeline.window)) for kind, each in timeline.collectives.items()}
    running = merged(interval for each in kinds.values() for interval in each)
    exposed = None
    if timeline.kernels is not None:
        exposed = length(running) - overlap(running, merged(clipped(timeline.kernels, timeline.window)))
    return Shares(
        step_s=(end - begin) / timeline.steps,
        share=length(running) / (end - begin),
        exposed_share=None if exposed is None else max(0.0, exposed) / (end - begin),
        by_collective={kind: length(each) / timeline.steps for kind, each in sorted(kinds.items()) if each},
    )


def clipped(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """The parts of some intervals that lie in a window."""
    first, last = window
    return [(max(begin, first), min(end, last)) for begin, end in intervals if begin < last and end > first]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals in their order; empty ones are left out."""
    found: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def length(disjoint: Iterable[Interval]) -> float:
    """How long some disjoint intervals are together."""
    return sum(end - begin for begin, end in disjoint)


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """How long two lists run at the same time; both disjoint and in order, as ``merged`` leaves them."""
    total, here, there = 0.0, 0, 0
    while here < len(one) and there < len(other):
        begin = max(one[here][0], other[there][0])
        end = min(one[here][1], other[there][1])
        total += max(0.0, end - begin)
        if one[here][1] < other[there][1]:
            here += 1
        else:
            there += 1
    return total

"""Replay of a traced step on the model of the allocator: peaks, what they are made of, and the curve over the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from distexp.plan.allocator import Block, CachingAllocator, OutOfMemoryError
from distexp.plan.step_trace import PARTS, Event
from distexp.system.units import MIB

CURVE_POINTS = 160
LIMIT_ACCURACY = 0.01
"""Relative accuracy of the smallest memory in which a step runs."""


@dataclass(frozen=True)
class Point:
    """Memory in use after an event, in bytes by part."""

    phase: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Replay:
    """What a step needs on one GPU, in bytes.

    Attributes:
        required: Smallest limit of the reserved memory in which the step runs.
        peak: Parts at the peak of the allocated memory.
        curve: Parts through the step. Each point is the largest of an interval.
    """

    peak_allocated: int
    peak_reserved: int
    required: int
    peak: Point
    curve: tuple[Point, ...]


@dataclass
class _Recorder:
    """Replay of events, with what is in use by part."""

    allocator: CachingAllocator
    used: Counter[str] = field(default_factory=Counter)
    blocks: dict[int, tuple[Block, str]] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        if event.bytes >= 0:
            block = self.allocator.allocate(event.bytes, event.stream)
            self.blocks[event.block] = block, event.part
            self.used[event.part] += block.size
        else:
            block, part = self.blocks.pop(event.block)
            self.used[part] -= block.size
            self.allocator.free(block)


def replay(events: Sequence[Event]) -> Replay:
    """Return the peaks of the events on the GPU, without a limit of its memory.

    The step is replayed twice if it frees what it allocates, because the second one finds other free blocks.
    """
    on_gpu = [event for event in events if event.device == "gpu"]
    step = [event for event in on_gpu if event.phase != "setup"]
    recorder = _Recorder(CachingAllocator())
    peak = Point("setup", dict.fromkeys(PARTS, 0))
    curve = _Curve(len(step))
    for event in on_gpu:
        recorder.apply(event)
        if recorder.allocator.allocated > peak.total:
            peak = _point(event, recorder)
        if event.phase != "setup":
            curve.add(event, recorder)
    if _can_repeat(step):
        on_gpu += step
        for event in step:
            recorder.apply(event)
    allocator = recorder.allocator
    required = _smallest_limit(on_gpu, allocator.peak_allocated, allocator.peak_reserved)
    return Replay(allocator.peak_allocated, allocator.peak_reserved, required, peak, tuple(curve.points))


def host_peak(events: Iterable[Event]) -> int:
    """Return the largest number of bytes that the events use on the host."""
    used = peak = 0
    for event in events:
        if event.device == "host":
            used += event.bytes
            peak = max(peak, used)
    return peak


def _can_repeat(step: Sequence[Event]) -> bool:
    """Return whether a step frees what it allocates, and nothing else."""
    return {event.block for event in step if event.bytes >= 0} == {event.block for event in step if event.bytes < 0}


class _Curve:
    """Points of a step, thinned to the largest one of each interval."""

    def __init__(self, events: int) -> None:
        self.points: list[Point] = []
        self._width = max(1, -(-events // CURVE_POINTS))
        self._seen = 0

    def add(self, event: Event, recorder: _Recorder) -> None:
        starts = self._seen % self._width == 0
        self._seen += 1
        if starts:
            self.points.append(_point(event, recorder))
        elif recorder.allocator.allocated > self.points[-1].total:
            self.points[-1] = _point(event, recorder)


def _point(event: Event, recorder: _Recorder) -> Point:
    return Point(event.phase, {part: recorder.used[part] for part in PARTS})


def _smallest_limit(events: Sequence[Event], allocated: int, reserved: int) -> int:
    """Return the smallest limit in which the events run, by bisection."""
    low, high = allocated, reserved
    while high - low > max(LIMIT_ACCURACY * reserved, MIB):
        middle = (low + high) // 2
        if _runs(events, middle):
            high = middle
        else:
            low = middle
    return high


def _runs(events: Sequence[Event], limit: int) -> bool:
    recorder = _Recorder(CachingAllocator(limit))
    try:
        for event in events:
            recorder.apply(event)
    except OutOfMemoryError:
        return False
    return True

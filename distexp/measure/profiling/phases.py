"""Forward passes, backward passes and optimizer of a step, by the time of the CPU."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from distexp.measure.profiling.intervals import Interval
from distexp.runs.step_model import BACKWARD, FORWARD, OPTIMIZER

Place = tuple[str, int]
"""Phase and number of the micro-batch."""


@dataclass(frozen=True)
class StepPhases:
    """The phases of a step. The time between a backward pass and the next phase belongs to the next phase.

    Attributes:
        window: Start and end of the step on the CPU.
        backward: Start and end of each backward pass, one for each micro-batch.
        optimizer: Start of the optimizer.
    """

    window: Interval
    backward: tuple[Interval, ...]
    optimizer: float

    def place(self, when: float) -> Place:
        """Return the phase and the micro-batch of an instant."""
        last = max(0, len(self.backward) - 1)
        if when >= self.optimizer:
            return OPTIMIZER, last
        number = bisect_right([end for _, end in self.backward], when)
        if number >= len(self.backward):
            return (OPTIMIZER, last) if self.backward else (FORWARD, 0)
        return (BACKWARD if when >= self.backward[number][0] else FORWARD), number

    def edges(self) -> list[float]:
        """Return the times at which a phase starts or ends."""
        return sorted({*self.window, self.optimizer, *(edge for interval in self.backward for edge in interval)})


def find_phases(
    window: Interval,
    backward: Sequence[Interval],
    optimizer: Sequence[Interval],
    *,
    micro_batches: int,
    hooks: Sequence[float] = (),
) -> StepPhases:
    """Return the phases of a step.

    The backward pass consists of many events. The longest gaps between them are the forward passes.

    Args:
        window: Start and end of the step on the CPU.
        backward: Events of the backward passes.
        optimizer: Intervals of the optimizer.
        micro_batches: Micro-batches of the step.
        hooks: Times of reductions. Those after the last event of a backward pass belong to it.
    """
    inside = sorted(interval for interval in backward if window[0] <= interval[0] < window[1])
    update = min((start for start, _ in optimizer if window[0] <= start < window[1]), default=window[1])
    passes = _split_at_gaps([interval for interval in inside if interval[0] < update], micro_batches)
    nexts = [*(start for start, _ in passes[1:]), update]
    passes = [
        (start, max([end, *(after(hook) for hook in hooks if end <= hook < limit)]))
        for (start, end), limit in zip(passes, nexts, strict=False)
    ]
    return StepPhases(window, tuple(passes), max(update, passes[-1][1]) if passes else update)


def after(when: float) -> float:
    """Return an instant right after another one: a nanosecond later."""
    return when + 1e-9


def _split_at_gaps(events: Sequence[Interval], count: int) -> list[Interval]:
    """Return start and end of some groups of sorted events, which the longest gaps separate."""
    ends, latest = [], float("-inf")
    for _, end in events:
        latest = max(latest, end)
        ends.append(latest)
    gaps = [(events[i][0] - ends[i - 1], i) for i in range(1, len(events))]
    starts = sorted(i for gap, i in sorted(gaps)[::-1][: max(0, count - 1)] if gap > 0)
    edges = [0, *starts, len(events)]
    return [(events[a][0], ends[b - 1]) for a, b in pairwise(edges) if b > a]

"""Speedup: throughput relative to the baseline run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from distexp.report.data.metrics import SPEED, SPEEDUP
from distexp.report.data.repeats import RunGroup


def add_speedup(groups: Sequence[RunGroup]) -> RunGroup | None:
    """Fill in the speedups of the rows and return the baseline.

    The baseline is the first completed group of a task that other groups have too. Rows of other tasks get no
    speedup.

    Returns:
        None if no two groups can be compared.
    """
    measured = [group for group in groups if group.completed and group.metric(SPEED)]
    tasks = Counter(group.task for group in measured)
    comparable = [group for group in measured if tasks[group.task] > 1]
    if not comparable:
        return None
    baseline = comparable[0]
    speed = baseline.metric(SPEED)
    assert speed is not None
    for group in comparable:
        if group.task == baseline.task and speed.mean:
            _fill_in(group, speed.mean)
    return baseline


def _fill_in(group: RunGroup, baseline_speed: float) -> None:
    for row in group.counted_rows:
        if (speed := row.metrics[SPEED]) is not None:
            row.metrics[SPEEDUP] = speed / baseline_speed

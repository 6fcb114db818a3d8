"""Rankings of runs: by task, by one metric, and the Pareto front of memory and throughput."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from distexp.report.data.metrics import MEMORIES, SPEED
from distexp.report.data.overview import Overview
from distexp.report.data.repeats import RunGroup, Spread


def memory_metric(overview: Overview) -> str | None:
    """Return the first metric of ``MEMORIES`` that a completed run has; None if there is none."""
    done = [row for row in overview.rows if row.completed]
    return next((name for name in MEMORIES if any(row.metrics[name] is not None for row in done)), None)


def group_by_task(groups: Sequence[RunGroup]) -> dict[str, list[RunGroup]]:
    """Collect groups by task. Runs of different tasks (model and data set) are not comparable."""
    tasks: dict[str, list[RunGroup]] = {}
    for group in groups:
        tasks.setdefault(group.task, []).append(group)
    return tasks


def rank_by_metric(
    overview: Overview, name: str, *, largest: bool
) -> Iterator[tuple[str, list[tuple[RunGroup, Spread]]]]:
    """Yield each task with its completed groups that have the metric, the best first."""
    known = [group for group in overview.groups if group.completed and group.metric(name)]
    for task, groups in group_by_task(known).items():
        pairs = [(group, value) for group in groups if (value := group.metric(name))]
        yield task, sorted(pairs, key=lambda pair: pair[1].mean, reverse=largest)


def pareto_fronts(overview: Overview, memory: str) -> list[list[RunGroup]]:
    """Return the Pareto front of each task: no other group is both smaller and faster. The smallest comes first."""
    known = [group for group in overview.groups if group.completed and group.metric(memory) and group.metric(SPEED)]
    return [_pareto_front(groups, memory) for groups in group_by_task(known).values()]


def _pareto_front(groups: Sequence[RunGroup], memory: str) -> list[RunGroup]:
    known = [
        (size.mean, -speed.mean, n) for n, group in enumerate(groups)
        if (size := group.metric(memory)) and (speed := group.metric(SPEED))
    ]  # fmt: skip
    front: list[RunGroup] = []
    best = math.inf
    for _, slowness, n in sorted(known):
        if slowness < best:
            best = slowness
            front.append(groups[n])
    return front

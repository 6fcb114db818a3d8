"""Rankings of runs: by task, by one metric, and the Pareto front of a cost and throughput."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from distexp.report.data.metrics import MEMORIES, SPEED
from distexp.report.data.overview import Overview
from distexp.report.data.repeats import RunGroup, Spread, is_within_noise


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


def equal_to_best(ranked: Sequence[tuple[RunGroup, Spread]]) -> list[tuple[RunGroup, Spread]]:
    """Return the groups after the best one that differ from it by less than the noise."""
    _, best = ranked[0]
    return [(group, value) for group, value in ranked[1:] if is_within_noise(best, value)]


def pareto_fronts(overview: Overview, cost: str) -> list[list[RunGroup]]:
    """Return the Pareto front of each task: no other group is both cheaper and faster. The cheapest comes first.

    The cost is a metric such as the memory or the energy per sample.
    A difference within the noise does not count. Of two runs with equal speeds only the cheaper one is on the front.
    """
    known = [group for group in overview.groups if group.completed and group.metric(cost) and group.metric(SPEED)]
    return [_pareto_front(groups, cost) for groups in group_by_task(known).values()]


def _pareto_front(groups: Sequence[RunGroup], cost: str) -> list[RunGroup]:
    points = [
        (size, speed, group) for group in groups
        if (size := group.metric(cost)) and (speed := group.metric(SPEED))
    ]  # fmt: skip
    points.sort(key=lambda point: (point[0].mean, -point[1].mean))
    front: list[tuple[Spread, Spread, RunGroup]] = []
    best = -math.inf
    for size, speed, group in points:
        if speed.mean > best:
            best = speed.mean
            front.append((size, speed, group))
    return [
        group for size, speed, group in front
        if not any(_dominates(other, (size, speed)) for *other, _ in front)
    ]  # fmt: skip


def _dominates(one: Sequence[Spread], other: Sequence[Spread]) -> bool:
    """Return whether a point is better than another in cost or speed, and not worse in the other one."""
    size, speed = _order(other[0], one[0]), _order(one[1], other[1])
    return size >= 0 and speed >= 0 and size + speed > 0


def _order(one: Spread, other: Spread) -> int:
    """Return 1 if the first value is larger, -1 if it is smaller, 0 if they are equal within the noise."""
    if one.mean == other.mean or is_within_noise(one, other):
        return 0
    return 1 if one.mean > other.mean else -1

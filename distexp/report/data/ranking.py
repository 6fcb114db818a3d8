"""Rankings of runs: by task, by one metric, and the Pareto front of a cost and throughput."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distexp.report.data.metrics import MEMORIES, SPEED
from distexp.report.data.overview import Overview
from distexp.report.data.repeats import RunGroup
from distexp.statistics.noise import Spread, is_within_noise


@dataclass(frozen=True)
class RankedGroup:
    """A training with the value of the metric by which it is ranked."""

    group: RunGroup
    value: Spread


@dataclass(frozen=True)
class Ranking:
    """The trainings of a task, the best first."""

    task: str
    ranked: tuple[RankedGroup, ...]

    @property
    def best(self) -> RankedGroup:
        """Return the first training."""
        return self.ranked[0]

    @property
    def equal_to_best(self) -> tuple[RankedGroup, ...]:
        """Return the trainings after the best one that differ from it by less than the noise."""
        return tuple(other for other in self.ranked[1:] if is_within_noise(self.best.value, other.value))


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


def rank_by_metric(overview: Overview, name: str, *, largest: bool) -> Iterator[Ranking]:
    """Yield a ranking of each task: its completed groups that have the metric. Disturbed ones have no known speed.

    Args:
        overview: The runs.
        name: Name of the metric.
        largest: Whether the largest value is the best.
    """
    completed = [group for group in overview.groups if group.completed and group.metric(name)]
    known = [group for group in completed if name != SPEED or group.disturbance is None]
    for task, groups in group_by_task(known).items():
        ranked = [RankedGroup(group, value) for group in groups if (value := group.metric(name))]
        yield Ranking(task, tuple(sorted(ranked, key=lambda one: one.value.mean, reverse=largest)))


def pareto_fronts(overview: Overview, cost: str) -> list[list[RunGroup]]:
    """Return the Pareto front of each task: no other group is both cheaper and faster. The cheapest comes first.

    The cost is a metric such as the memory or the energy per sample.
    A difference within the noise does not count. Of two runs with equal speeds only the cheaper one is on the front.
    Disturbed runs are left out.
    """
    measured = [group for group in overview.groups if group.completed and group.metric(cost) and group.metric(SPEED)]
    known = [group for group in measured if group.disturbance is None]
    return [_pareto_front(groups, cost) for groups in group_by_task(known).values()]


@dataclass(frozen=True)
class _Point:
    group: RunGroup
    cost: Spread
    speed: Spread

    def dominates(self, other: _Point) -> bool:
        """Return whether this point is better in cost or speed, and not worse in the other one."""
        cheaper, faster = _order(other.cost, self.cost), _order(self.speed, other.speed)
        return cheaper >= 0 and faster >= 0 and cheaper + faster > 0


def _pareto_front(groups: Sequence[RunGroup], cost: str) -> list[RunGroup]:
    points = [
        _Point(group, size, speed) for group in groups
        if (size := group.metric(cost)) and (speed := group.metric(SPEED))
    ]  # fmt: skip
    points.sort(key=lambda point: (point.cost.mean, -point.speed.mean))
    front: list[_Point] = []
    for point in points:
        if not front or _order(point.speed, front[-1].speed) > 0:
            front.append(point)
    return [point.group for point in front if not any(other.dominates(point) for other in front)]


def _order(one: Spread, other: Spread) -> int:
    """Return 1 if the first value is larger, -1 if it is smaller, 0 if they are equal within the noise."""
    if one.mean == other.mean or is_within_noise(one, other):
        return 0
    return 1 if one.mean > other.mean else -1

"""How trainings grow with the number of workers: which belong together, and how efficient each is.

Efficiency = ideal time / real time. The ideal time is that of the fewest workers of the same
configuration, for as much work as each worker has: so the same formula serves strong scaling (the total
work is constant) and weak scaling (the work of a worker is).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distexp.report.data.metrics import EFFICIENCY, SPEED
from distexp.report.data.repeats import RunGroup
from distexp.report.data.settings import ORDER, SEED, format_setting

WORLD = ("nodes", "workers")
NEVER_FOLLOWS = frozenset(ORDER) - set(WORLD)
"""Choices that make another configuration, even where each was run with one number of workers alone."""

CONSTANT_WITHIN = 0.05  # relative; the last step of an epoch may be a part of one


@dataclass(frozen=True)
class ScalingPoint:
    """A training of a series."""

    group: RunGroup
    workers: int
    nodes: int
    speed: float  # samples/s
    work: float  # samples x parameters; 1 where all of a series train on the same whole data set
    samples: float | None  # that the training sees; None where that is not known
    time: float  # of that work; in seconds where the samples are known
    efficiency: float  # ideal time / real time
    speedup: float  # of the work done in a second, against the reference

    @property
    def relative_time(self) -> float:
        """Against the reference."""
        return 1 / self.efficiency


@dataclass(frozen=True)
class ScalingSeries:
    """One configuration on different numbers of workers, the fewest first."""

    name: str  # what tells it from the other series; empty where there is one only
    kind: str  # strong: constant total work; weak: constant work per worker; mixed: neither
    points: tuple[ScalingPoint, ...]

    @property
    def baseline(self) -> ScalingPoint:
        """What the others are measured against."""
        return self.points[0]

    def node_pairs(self) -> Iterator[tuple[ScalingPoint, ScalingPoint]]:
        """Equal numbers of workers, on fewer nodes and on more: what crossing nodes costs."""
        for index, one in enumerate(self.points):
            for other in self.points[index + 1 :]:
                if one.workers == other.workers and one.nodes < other.nodes and _same_work(one, other):
                    yield one, other


def find_scaling_series(groups: Sequence[RunGroup], varied: Sequence[str]) -> list[ScalingSeries]:
    """The configurations that ran on more than one number of workers or nodes."""
    measured = [group for group in groups if _measured(group)]
    names = _own_settings(measured, varied)
    members: dict[str, list[RunGroup]] = {}
    for group in measured:
        key = json.dumps([group.setting(name) for name in names], default=str)
        members.setdefault(key, []).append(group)
    several = [each for each in members.values() if len({_world(group) for group in each}) > 1]
    found = [
        ScalingSeries(_name(each[0], names), kind, points)
        for each in several
        for kind, points in [_points(each)]
    ]  # fmt: skip
    return sorted(found, key=lambda series: -len(series.points))


def add_efficiency(series: Sequence[ScalingSeries]) -> None:
    """Fills in the rows' efficiencies, in per cent."""
    for point in (point for each in series for point in each.points):
        for row in point.group.counted_rows:
            if (speed := row.metrics[SPEED]) is not None and point.speed:
                row.metrics[EFFICIENCY] = 100 * point.efficiency * speed / point.speed


def _measured(group: RunGroup) -> bool:
    speed = group.metric(SPEED)
    return group.completed and speed is not None and speed.mean > 0 and bool(group.setting("workers"))


def _world(group: RunGroup) -> tuple[int, int]:
    return int(group.setting("workers")), int(group.setting("nodes") or 1)


def _own_settings(groups: Sequence[RunGroup], varied: Sequence[str]) -> list[str]:
    """What tells configurations apart: neither the number of workers, nor what is scaled along with it."""
    chosen = [name for name in varied if name not in (*WORLD, SEED)]
    return [name for name in chosen if name in NEVER_FOLLOWS or not _follows_world(groups, name, chosen)]


def _follows_world(groups: Sequence[RunGroup], name: str, chosen: Sequence[str]) -> bool:
    """Whether a setting is given by the number of workers and nodes, as under weak scaling."""
    fixed = [other for other in chosen if other in NEVER_FOLLOWS]
    given: dict[str, str] = {}
    values = set()
    for group in groups:
        key = json.dumps([_world(group), *(group.setting(other) for other in fixed)], default=str)
        value = json.dumps(group.setting(name), default=str)
        values.add(value)
        if given.setdefault(key, value) != value:
            return False
    return len(values) > 1


def _name(group: RunGroup, names: Sequence[str]) -> str:
    return ", ".join(f"{name}={format_setting(group.setting(name), 24)}" for name in names
                     if group.setting(name) is not None)  # fmt: skip


def _points(groups: Sequence[RunGroup]) -> tuple[str, tuple[ScalingPoint, ...]]:
    ordered = sorted(groups, key=_world)
    works = _works(ordered)
    speeds = [spread.mean for group in ordered if (spread := group.metric(SPEED))]
    samples = [_samples(group) for group in ordered]
    known = [count for count in samples if count]
    times = [(count if len(known) == len(ordered) and count else 1.0) / speed
             for count, speed in zip(samples, speeds, strict=True)]  # fmt: skip
    worlds = [_world(group)[0] for group in ordered]
    rates = [work / time for work, time in zip(works, times, strict=True)]
    points = tuple(
        ScalingPoint(
            group, worlds[n], _world(group)[1], speeds[n], works[n], samples[n], times[n],
            efficiency=rates[n] / worlds[n] * worlds[0] / rates[0], speedup=rates[n] / rates[0],
        )
        for n, group in enumerate(ordered)
    )  # fmt: skip
    if _constant(works):
        return "strong", points
    each = [work / world for work, world in zip(works, worlds, strict=True)]
    return ("weak" if _constant(each) else "mixed"), points


def _works(groups: Sequence[RunGroup]) -> list[float]:
    """The work of each: samples, times parameters where those differ; 1 where the samples are not known."""
    samples = [_samples(group) for group in groups]
    known = [count for count in samples if count]
    counts = known if len(known) == len(groups) else [1.0] * len(groups)
    parameters = [row.record.built.parameters if (row := group.counted_rows[0]).record.built else 0 for group in groups]
    if min(parameters) > 0 and len(set(parameters)) > 1:
        return [count * size for count, size in zip(counts, parameters, strict=True)]
    return counts


def _samples(group: RunGroup) -> float | None:
    """Samples that a training sees; None where that is the whole of a data set of unknown size."""
    names = ("micro_batch_size", "gradient_accumulation_steps", "num_epochs", "dataset.train_size", "max_steps")
    micro, accumulation, epochs, size, most = (group.setting(name) for name in names)
    steps = group.counted_rows[0].record.metrics.total_steps or most
    bounds = [size * epochs] if size and epochs else []
    if steps and micro and accumulation:
        bounds.append(steps * micro * accumulation * _world(group)[0])
    return min(bounds, default=None)


def _constant(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= CONSTANT_WITHIN * max(values)


def _same_work(one: ScalingPoint, other: ScalingPoint) -> bool:
    return _constant([one.work, other.work])

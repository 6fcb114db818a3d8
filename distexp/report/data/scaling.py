"""Scaling series: a configuration on different numbers of workers.

Efficiency = ideal time / real time. The ideal time is that of the fewest workers for the same work per worker. So one
formula serves strong scaling (constant total work) and weak scaling (constant work per worker).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distexp.report.data.metrics import EFFICIENCY, SPEED
from distexp.report.data.repeats import RunGroup
from distexp.report.data.setting_names import SEED, WORKERS, usual_order
from distexp.report.data.settings import format_settings

WORLD = ("nodes", WORKERS)
TOLERANCE = 0.05  # relative difference of equal work; the last step of an epoch may be incomplete


@dataclass(frozen=True)
class ScalingPoint:
    """A training of a series.

    Attributes:
        speed: Samples per second.
        work: Samples times parameters; 1 if the number of samples is unknown and equal in all of the series.
        samples: Samples that the training processes; None if unknown.
        time: Time of that work, in seconds if the number of samples is known.
        efficiency: Ideal time / real time.
        speedup: Work per second relative to the baseline.
    """

    group: RunGroup
    workers: int
    nodes: int
    speed: float
    work: float
    samples: float | None
    time: float
    efficiency: float
    speedup: float

    @property
    def relative_time(self) -> float:
        """Time relative to the baseline for equal work per worker."""
        return 1 / self.efficiency


@dataclass(frozen=True)
class ScalingSeries:
    """One configuration on different numbers of workers.

    Attributes:
        name: Settings that distinguish it from the other series; empty for a single series.
        kind: ``strong`` (constant total work), ``weak`` (constant work per worker), or ``mixed``.
        points: By number of workers.
    """

    name: str
    kind: str
    points: tuple[ScalingPoint, ...]

    @property
    def baseline(self) -> ScalingPoint:
        """The point with the fewest workers."""
        return self.points[0]

    def node_pairs(self) -> Iterator[tuple[ScalingPoint, ScalingPoint]]:
        """Yield pairs with equal numbers of workers, on fewer nodes and on more."""
        for index, one in enumerate(self.points):
            for other in self.points[index + 1 :]:
                if one.workers == other.workers and one.nodes < other.nodes and _is_constant([one.work, other.work]):
                    yield one, other


def find_scaling_series(groups: Sequence[RunGroup], varied: Sequence[str]) -> list[ScalingSeries]:
    """Return the series of configurations, the longest first.

    Args:
        groups: Groups of repeats.
        varied: Names of the settings in which the groups differ.
    """
    measured = [group for group in groups if _is_measured(group)]
    names = _configuration_settings(measured, varied)
    members: dict[str, list[RunGroup]] = {}
    for group in measured:
        key = json.dumps([group.setting(name) for name in names], default=str)
        members.setdefault(key, []).append(group)
    several = [each for each in members.values() if len({_world(group) for group in each}) > 1]
    series = [_make_series(each, names) for each in several]
    return sorted(series, key=lambda one: -len(one.points))


def add_efficiency(series: Sequence[ScalingSeries]) -> None:
    """Fill in the efficiencies of the rows, in percent."""
    for point in (point for each in series for point in each.points):
        for row in point.group.counted_rows:
            if (speed := row.metrics[SPEED]) is not None and point.speed:
                row.metrics[EFFICIENCY] = 100 * point.efficiency * speed / point.speed


def _is_measured(group: RunGroup) -> bool:
    speed = group.metric(SPEED)
    return group.completed and speed is not None and speed.mean > 0 and bool(group.setting(WORKERS))


def _world(group: RunGroup) -> tuple[int, int]:
    """Return the number of workers and the number of nodes."""
    return int(group.setting(WORKERS)), int(group.setting("nodes") or 1)


def _configuration_settings(groups: Sequence[RunGroup], varied: Sequence[str]) -> list[str]:
    """Return the settings that distinguish configurations.

    These are not the number of workers, nor the settings that are scaled with it.
    """
    names = [name for name in varied if name not in (*WORLD, SEED)]
    choices = [name for name in names if name in usual_order()]
    return [name for name in names if name in choices or not _follows_world(groups, name, choices)]


def _follows_world(groups: Sequence[RunGroup], name: str, choices: Sequence[str]) -> bool:
    """Return whether workers and nodes decide a setting, as in weak scaling.

    Args:
        groups: The measured groups.
        name: The setting.
        choices: Settings that always make another configuration, even if each ran on one number of workers only.
    """
    values: dict[str, str] = {}
    for group in groups:
        key = json.dumps([_world(group), *(group.setting(other) for other in choices)], default=str)
        value = json.dumps(group.setting(name), default=str)
        if values.setdefault(key, value) != value:
            return False
    return len(set(values.values())) > 1


def _make_series(groups: Sequence[RunGroup], names: Sequence[str]) -> ScalingSeries:
    ordered = sorted(groups, key=_world)
    works = _works(ordered)
    points = _points(ordered, works)
    return ScalingSeries(format_settings(groups[0].settings, names), _kind(points), points)


def _points(groups: Sequence[RunGroup], works: Sequence[float]) -> tuple[ScalingPoint, ...]:
    speeds = [spread.mean for group in groups if (spread := group.metric(SPEED))]
    samples = [_samples(group) for group in groups]
    counts = [count or 1.0 for count in samples] if all(samples) else [1.0] * len(groups)
    times = [count / speed for count, speed in zip(counts, speeds, strict=True)]
    worlds = [_world(group) for group in groups]
    rates = [work / time for work, time in zip(works, times, strict=True)]
    fewest = worlds[0][0]
    return tuple(
        ScalingPoint(
            group, *worlds[n], speeds[n], works[n], samples[n], times[n],
            efficiency=rates[n] / worlds[n][0] * fewest / rates[0], speedup=rates[n] / rates[0],
        )
        for n, group in enumerate(groups)
    )  # fmt: skip


def _kind(points: Sequence[ScalingPoint]) -> str:
    if _is_constant([point.work for point in points]):
        return "strong"
    return "weak" if _is_constant([point.work / point.workers for point in points]) else "mixed"


def _works(groups: Sequence[RunGroup]) -> list[float]:
    """Return the work of each group: samples, times parameters if these differ.

    If the number of samples is unknown, the groups are taken to process equally many.
    """
    samples = [_samples(group) for group in groups]
    counts = [count or 1.0 for count in samples] if all(samples) else [1.0] * len(groups)
    parameters = [row.record.built.parameters if (row := group.counted_rows[0]).record.built else 0 for group in groups]
    if min(parameters) > 0 and len(set(parameters)) > 1:
        return [count * size for count, size in zip(counts, parameters, strict=True)]
    return counts


def _samples(group: RunGroup) -> float | None:
    """Return the samples that a training processes; None if unknown."""
    names = ("micro_batch_size", "gradient_accumulation_steps", "num_epochs", "dataset.train_size", "max_steps")
    micro, accumulation, epochs, size, max_steps = (group.setting(name) for name in names)
    steps = group.counted_rows[0].record.metrics.total_steps or max_steps
    bounds = [size * epochs] if size and epochs else []
    if steps and micro and accumulation:
        bounds.append(steps * micro * accumulation * _world(group)[0])
    return min(bounds, default=None)


def _is_constant(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= TOLERANCE * max(values)

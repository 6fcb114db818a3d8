"""Scaling series: a configuration on different numbers of workers.

Efficiency = ideal time / real time. The ideal time is that of the fewest workers for the same work per worker. So one
formula serves strong scaling (constant total work) and weak scaling (constant work per worker).

On CPU, runs with different numbers of threads per worker are not in one series: their speeds show the threads as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distexp.report.data.metrics import EFFICIENCY, SPEED
from distexp.report.data.repeats import RunGroup, group_by_settings
from distexp.report.data.scaling_work import is_constant, parameters_of, sample_counts, samples_of, works_of, world_of
from distexp.report.data.setting_names import SEED, WORKERS, usual_order
from distexp.report.data.settings import format_settings

WORLD = ("nodes", WORKERS)
THREADS = "cpus_per_worker"
FORECAST = "forecast"
"""Kind of a series with one measured point, next to which forecasts are drawn."""

MAX_TRUSTED_EFFICIENCY = 1.05  # efficiency; more than ideal shows that the baseline was slow


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
        kind: ``strong`` (constant total work), ``weak`` (constant work per worker), ``mixed``, or ``forecast``.
        scaled: What grows or shrinks with the workers: ``model``, ``data``, both, or nothing.
        points: By number of workers.
    """

    name: str
    kind: str
    scaled: tuple[str, ...]
    points: tuple[ScalingPoint, ...]

    @property
    def title(self) -> str:
        """Return the name of the kind of scaling, with what was scaled: ``Weak scaling of the model``."""
        if self.kind == FORECAST:
            return "Forecast"
        if self.kind == "strong":
            return "Strong scaling"
        what = " and ".join(self.scaled)
        if self.kind == "weak":
            return f"Weak scaling of the {what}" if what else "Weak scaling"
        return f"{what.capitalize()} scaling" if what else "Mixed scaling"

    @property
    def baseline(self) -> ScalingPoint:
        """Return the point with the fewest workers."""
        return self.points[0]

    @property
    def noise(self) -> float | None:
        """Relative noise of the efficiency at the most workers; None if unknown."""
        speeds = [point.group.metric(SPEED) for point in (self.baseline, self.points[-1])]
        noises = [speed.noise / speed.mean for speed in speeds if speed and speed.noise is not None]
        return math.hypot(*noises) if len(noises) == 2 else None

    @property
    def has_several_sizes(self) -> bool:
        """Return whether the numbers of workers differ, and not only those of nodes."""
        return self.points[-1].workers > self.baseline.workers

    @property
    def is_disturbed(self) -> bool:
        """Return whether something else slowed a run of the series down."""
        return any(point.group.disturbance for point in self.points)

    @property
    def is_trusted(self) -> bool:
        """Return whether no efficiency is far above 100 %. Else the baseline was slowed down by something else."""
        return all(point.efficiency <= MAX_TRUSTED_EFFICIENCY for point in self.points)

    def node_pairs(self) -> Iterator[tuple[ScalingPoint, ScalingPoint]]:
        """Yield pairs with equal numbers of workers, on fewer nodes and on more."""
        for index, one in enumerate(self.points):
            for other in self.points[index + 1 :]:
                if one.workers == other.workers and one.nodes < other.nodes and is_constant([one.work, other.work]):
                    yield one, other


def find_scaling_series(groups: Sequence[RunGroup], varied: Sequence[str]) -> list[ScalingSeries]:
    """Return the series of configurations, the longest first.

    Args:
        groups: Groups of repeats.
        varied: Names of the settings in which the groups differ.
    """
    measured = [group for group in groups if _is_measured(group)]
    names = _configuration_settings(measured, varied)
    several = [
        same_threads
        for members in group_by_settings(measured, names).values()
        for same_threads in _by_threads(members)
        if _has_several_worlds(same_threads)
    ]
    return sorted((_make_series(members, names) for members in several), key=lambda series: -len(series.points))


def make_forecast_series(group: RunGroup, varied: Sequence[str]) -> ScalingSeries | None:
    """Return the series of a single measured training with forecasts; None if its speed was not measured."""
    if not _is_measured(group):
        return None
    names = [name for name in varied if name not in (*WORLD, SEED)]
    return replace(_make_series([group], names), kind=FORECAST)


def groups_without_baseline(groups: Sequence[RunGroup], varied: Sequence[str]) -> list[RunGroup]:
    """Return the groups that would be in a series if all had the same number of threads per worker."""
    measured = [group for group in groups if _is_measured(group)]
    found: list[RunGroup] = []
    for members in group_by_settings(measured, _configuration_settings(measured, varied)).values():
        if _has_several_worlds(members):
            alone = [same_threads for same_threads in _by_threads(members) if not _has_several_worlds(same_threads)]
            found += [group for same_threads in alone for group in same_threads]
    return found


def _by_threads(groups: Sequence[RunGroup]) -> list[list[RunGroup]]:
    """Split groups by their threads per worker; on GPUs these hardly matter."""
    members: dict[Any, list[RunGroup]] = {}
    for group in groups:
        members.setdefault(threads_per_worker(group), []).append(group)
    return list(members.values())


def threads_per_worker(group: RunGroup) -> int | None:
    """Return the CPU threads of a worker; None on GPUs, or if unknown."""
    threads = group.setting(THREADS)
    return int(threads) if threads and group.setting("device") == "cpu" else None


def _has_several_worlds(groups: Sequence[RunGroup]) -> bool:
    return len({world_of(group) for group in groups}) > 1


def add_efficiency(series: Sequence[ScalingSeries]) -> None:
    """Fill in the efficiencies of the rows, in percent."""
    for point in (point for one_series in series for point in one_series.points):
        for row in point.group.counted_rows:
            if (speed := row.metrics[SPEED]) is not None and point.speed:
                row.metrics[EFFICIENCY] = 100 * point.efficiency * speed / point.speed


def _is_measured(group: RunGroup) -> bool:
    speed = group.metric(SPEED)
    return group.completed and speed is not None and speed.mean > 0 and bool(group.setting(WORKERS))


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
        key = json.dumps([world_of(group), *(group.setting(other) for other in choices)], default=str)
        value = json.dumps(group.setting(name), default=str)
        if values.setdefault(key, value) != value:
            return False
    return len(set(values.values())) > 1


def _make_series(groups: Sequence[RunGroup], names: Sequence[str]) -> ScalingSeries:
    points = _make_points(sorted(groups, key=world_of))
    return ScalingSeries(format_settings(groups[0].settings, names), _kind(points), _scaled(points), points)


def _make_points(groups: Sequence[RunGroup]) -> tuple[ScalingPoint, ...]:
    """Return a point for each group. The first group is the baseline."""
    works = works_of(groups)
    times = [count / _speed(group) for group, count in zip(groups, sample_counts(groups), strict=True)]
    baseline_rate, fewest = works[0] / times[0], world_of(groups[0]).workers
    points = []
    for group, work, time in zip(groups, works, times, strict=True):
        world, rate = world_of(group), work / time
        efficiency = rate / world.workers * fewest / baseline_rate
        point = ScalingPoint(
            group=group,
            workers=world.workers,
            nodes=world.nodes,
            speed=_speed(group),
            work=work,
            samples=samples_of(group),
            time=time,
            efficiency=efficiency,
            speedup=rate / baseline_rate,
        )
        points.append(point)
    return tuple(points)


def _speed(group: RunGroup) -> float:
    speed = group.metric(SPEED)
    assert speed is not None, "a series has measured groups only"
    return speed.mean


def _kind(points: Sequence[ScalingPoint]) -> str:
    if is_constant([point.work for point in points]):
        return "strong"
    return "weak" if is_constant([point.work / point.workers for point in points]) else "mixed"


def _scaled(points: Sequence[ScalingPoint]) -> tuple[str, ...]:
    """Return what differs between the points: the parameters, the samples, or both."""
    sizes = [parameters_of(point.group) for point in points]
    samples = [point.samples or 0.0 for point in points]
    found = {"model": len(set(sizes)) > 1, "data": max(samples) > 0 and not is_constant(samples)}
    return tuple(name for name, differs in found.items() if differs)

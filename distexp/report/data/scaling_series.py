"""Scaling series: a configuration on different numbers of workers.

Efficiency = ideal time / real time. The ideal time is that of the fewest workers for the same work per worker. So one
formula serves strong scaling (constant total work) and weak scaling (constant work per worker).
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from distexp.report.data.metrics import EFFICIENCY, SPEED, SPEEDUP
from distexp.report.data.repeats import RunGroup, collect, follows, group_by_settings
from distexp.report.data.rows import (
    SEED,
    WORKERS,
    format_settings,
    global_batch,
    is_strategy_option,
    usual_order,
    value_key,
)
from distexp.statistics.noise import Spread, is_within_noise

WORLD = ("nodes", WORKERS)
THREADS = "cpus_per_worker"
FORECAST = "forecast"  # kind of a series with one measured point, next to which forecasts are drawn
MAX_TRUSTED_EFFICIENCY = 1.05  # efficiency; more than ideal shows that the baseline was slow
TOLERANCE = 0.05  # relative difference of equal work; the last step of an epoch may be incomplete


@dataclass(frozen=True)
class ScalingPoint:
    """A training of a series."""

    group: RunGroup
    workers: int
    nodes: int
    speed: float  # samples per second
    work: float  # samples times parameters; 1 if the number of samples is unknown and equal in all of the series
    samples: float | None  # that the training processes; None if unknown
    time: float  # of that work, in seconds if the number of samples is known
    efficiency: float  # ideal time / real time
    speedup: float  # work per second relative to the baseline

    @property
    def relative_time(self) -> float:
        """Time relative to the baseline for equal work per worker."""
        return 1 / self.efficiency


@dataclass(frozen=True)
class ScalingSeries:
    """One configuration on different numbers of workers."""

    name: str  # settings that distinguish it from the other series; empty for a single series
    kind: str  # strong (constant total work), weak (constant work per worker), mixed, or forecast
    scaled: tuple[str, ...]  # what grows or shrinks with the workers: model, data, both, or nothing
    points: tuple[ScalingPoint, ...]  # by number of workers

    @property
    def title(self) -> str:
        """Return the name of the kind of scaling, with what was scaled: ``Weak scaling of the model``."""
        if self.kind in (FORECAST, "strong"):
            return "Forecast" if self.kind == FORECAST else "Strong scaling"
        what = " and ".join(self.scaled)
        if self.kind == "weak":
            return f"Weak scaling of the {what}" if what else "Weak scaling"
        return f"{what.capitalize() or 'Mixed'} scaling"

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

    On CPU, runs with different numbers of threads per worker are not in one series: their speeds show the threads, too.
    """
    measured = [group for group in groups if _is_measured(group)]
    names = _configuration_settings(measured, varied)
    several = [
        same_threads
        for members in group_by_settings(measured, names).values()
        for same_threads in collect(members, threads_per_worker).values()
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
            by_threads = collect(members, threads_per_worker).values()
            found += [group for alone in by_threads if not _has_several_worlds(alone) for group in alone]
    return found


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
    """Return the settings that distinguish configurations: not the workers, nor what is scaled with them."""
    names = [name for name in varied if name not in (*WORLD, SEED)]
    choices = [name for name in names if name in usual_order()]
    return [name for name in names if name in choices or not _follows_world(groups, name, choices)]


def _follows_world(groups: Sequence[RunGroup], name: str, choices: Sequence[str]) -> bool:
    """Return whether workers and nodes decide a setting, as in weak scaling. ``choices`` never follow."""
    differs = len({value_key(group.setting(name)) for group in groups}) > 1
    return differs and follows([group.settings for group in groups], name, (*WORLD, *choices))


def _make_series(groups: Sequence[RunGroup], names: Sequence[str]) -> ScalingSeries:
    points = _make_points(sorted(groups, key=world_of))
    return ScalingSeries(format_settings(groups[0].settings, names), _kind(points), _scaled(points), points)


def _make_points(groups: Sequence[RunGroup]) -> tuple[ScalingPoint, ...]:
    works = works_of(groups)
    speeds = [metric.mean for group in groups if (metric := group.metric(SPEED))]  # All groups are measured.
    times = [count / speed for count, speed in zip(sample_counts(groups), speeds, strict=True)]
    baseline_rate, fewest = works[0] / times[0], world_of(groups[0]).workers
    points = []
    for group, speed, work, time in zip(groups, speeds, works, times, strict=True):
        world, rate = world_of(group), work / time
        efficiency, speedup = rate / world.workers * fewest / baseline_rate, rate / baseline_rate
        points.append(ScalingPoint(group, *world, speed, work, samples_of(group), time, efficiency, speedup))
    return tuple(points)


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


class World(NamedTuple):
    """Numbers of workers and of nodes, by which a series is sorted."""

    workers: int
    nodes: int


def world_of(group: RunGroup) -> World:
    """Return the workers and nodes of a training."""
    return World(int(group.setting(WORKERS)), int(group.setting("nodes") or 1))


def parameters_of(group: RunGroup) -> int:
    """Return the number of parameters; 0 if unknown."""
    built = group.counted_rows[0].record.built
    return built.parameters if built else 0


def works_of(groups: Sequence[RunGroup]) -> list[float]:
    """Return the work of each group: samples, times parameters if these differ."""
    counts = sample_counts(groups)
    parameters = [parameters_of(group) for group in groups]
    if min(parameters) > 0 and len(set(parameters)) > 1:
        return [count * size for count, size in zip(counts, parameters, strict=True)]
    return counts


def sample_counts(groups: Sequence[RunGroup]) -> list[float]:
    """Return the samples that each group processes; 1 for all if a number is unknown, as if all were equal."""
    counts = [count for group in groups if (count := samples_of(group))]
    return counts if len(counts) == len(groups) else [1.0] * len(groups)


def samples_of(group: RunGroup) -> float | None:
    """Return the samples that a training processes; None if unknown. A packed row has several samples."""
    epochs, size, max_steps = (group.setting(name) for name in ("num_epochs", "dataset.train_size", "max_steps"))
    metrics = group.counted_rows[0].record.metrics
    if group.setting("dataset.packing"):
        known = size and metrics.total_steps and metrics.steps_per_epoch
        return float(size * metrics.total_steps / metrics.steps_per_epoch) if known else None
    steps = metrics.total_steps or max_steps
    bounds = [size * epochs] if size and epochs else []
    if steps and (batch := global_batch(group.settings)):
        bounds.append(steps * batch)
    return min(bounds, default=None)


def is_constant(values: Sequence[float]) -> bool:
    """Return whether values of at least 0 are equal, up to TOLERANCE."""
    return max(values) - min(values) <= TOLERANCE * max(values)


def add_speedup(groups: Sequence[RunGroup]) -> RunGroup | None:
    """Fill in the speedups of the rows and return the baseline; None if no two groups can be compared.

    The baseline is the first completed group of a task that other groups have too. Rows of other tasks get no speedup.
    """
    measured = [(group, speed.mean) for group in groups if group.completed and (speed := group.metric(SPEED))]
    tasks = Counter(group.task for group, _ in measured)
    baseline, base_speed = next(((group, mean) for group, mean in measured if tasks[group.task] > 1), (None, 0.0))
    alike = [group for group, _ in measured if baseline is not None and group.task == baseline.task]
    for row in (row for group in alike for row in group.counted_rows):
        if base_speed and (own := row.metrics[SPEED]) is not None:
            row.metrics[SPEEDUP] = own / base_speed
    return baseline


def exceeds_workers(group: RunGroup, baseline: RunGroup, varied: Sequence[str]) -> bool:
    """Return whether a speedup over a run of one worker is beyond the noise more than that of the workers.

    On CPU, more threads per worker explain a speedup too. If it is larger, and all but the strategy and the workers is
    equal, something slowed the one worker down.
    """
    speed, slow = group.metric(SPEED), baseline.metric(SPEED)
    strategy = baseline.rows[0].record.strategy
    has_one_worker = strategy is not None and strategy.one_worker
    if not has_one_worker or group.task != baseline.task or not (speed and slow and group.setting(WORKERS)):
        return False
    of_strategy = ("strategy", THREADS, *WORLD)
    others = [name for name in varied if name not in of_strategy and not is_strategy_option(name)]
    if any(group.setting(name) != baseline.setting(name) for name in others):
        return False
    threads = (threads_per_worker(group) or 1) / (threads_per_worker(baseline) or 1)
    ideal = world_of(group).workers / world_of(baseline).workers * max(1.0, threads)
    per_worker = Spread(speed.mean / ideal, None, None if speed.noise is None else speed.noise / ideal)
    return per_worker.mean > MAX_TRUSTED_EFFICIENCY * slow.mean and not is_within_noise(per_worker, slow)

"""Speedup: throughput relative to the baseline run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from distexp.report.data.metrics import SPEED, SPEEDUP
from distexp.report.data.repeats import RunGroup
from distexp.report.data.scaling import MAX_TRUSTED_EFFICIENCY, THREADS, WORLD, threads_per_worker
from distexp.report.data.scaling_work import world_of
from distexp.report.data.setting_names import WORKERS, is_strategy_option
from distexp.statistics.noise import Spread, is_within_noise


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


def exceeds_workers(group: RunGroup, baseline: RunGroup, varied: Sequence[str]) -> bool:
    """Return whether a speedup over a run of one worker is beyond the noise more than that of the workers.

    On CPU, more threads per worker explain a speedup too. If it is larger, and all but the strategy and the workers is
    equal, something slowed the one worker down.

    Args:
        varied: Names of the settings in which the runs differ.
    """
    speed, slow = group.metric(SPEED), baseline.metric(SPEED)
    if not _has_one_worker(baseline) or group.task != baseline.task or not (speed and slow and group.setting(WORKERS)):
        return False
    if any(group.setting(name) != baseline.setting(name) for name in varied if not _is_of_strategy(name)):
        return False
    ideal = _ideal_speedup(group, baseline)
    per_worker = Spread(speed.mean / ideal, None, None if speed.noise is None else speed.noise / ideal)
    return per_worker.mean > MAX_TRUSTED_EFFICIENCY * slow.mean and not is_within_noise(per_worker, slow)


def _has_one_worker(group: RunGroup) -> bool:
    """Return whether the strategy of a group trains on one worker, without distribution."""
    strategy = group.rows[0].record.strategy
    return strategy is not None and strategy.one_worker


def _ideal_speedup(group: RunGroup, baseline: RunGroup) -> float:
    """Return the speedup of the larger number of workers and, on CPU, of threads. Fewer threads are not slower."""
    threads = (threads_per_worker(group) or 1) / (threads_per_worker(baseline) or 1)
    return world_of(group).workers / world_of(baseline).workers * max(1.0, threads)


def _is_of_strategy(name: str) -> bool:
    """Return whether a setting is the strategy, one of its options, or the number of workers or their threads."""
    return name in ("strategy", THREADS, *WORLD) or is_strategy_option(name)


def _fill_in(group: RunGroup, baseline_speed: float) -> None:
    for row in group.counted_rows:
        if (speed := row.metrics[SPEED]) is not None:
            row.metrics[SPEEDUP] = speed / baseline_speed

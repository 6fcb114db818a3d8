"""Step times of all ranks, and the ranks that are slower than the others."""

from __future__ import annotations

import math
import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

MIN_STEPS, MIN_STEPS_CPU = 8, 30
"""Watched steps that a comparison of ranks needs. Other programs disturb CPUs for many steps at a time."""

SLOWER, SLOWER_CPU = 0.05, 0.1
"""A straggler's own time is longer than that of the others by this fraction of it."""

MIN_EXCESS_S, MIN_EXCESS_CPU_S = 0.003, 0.001
"""And by so many seconds a step. Rank 0 also writes the log, which takes less than 1 ms.

On a GPU the difference is larger if the CPUs launch kernels too slowly: they take turns at being ahead, and the GPU of
the rank that is ahead waits. Two H200s with steps of 8 ms had a difference of 2.4 ms.
"""

SIGNIFICANT = 2.33
"""And the difference is beyond the noise of the steps: standard normal quantile for one error in 100."""

MIN_EFFECT = 0.5
"""And its median is at least this fraction of its spread over the steps.

With many steps, the test of significance finds small differences too. A disturbance has them, with a large spread.
"""

NO_CPU_WORK = " (without the work of the CPUs: measure it with train.profile_steps=3)"
"""Added to own times of GPUs without a profile."""

MAX_SECTIONS = 4
SECTION_STEPS = 20
"""And half of it is there in each section of the training: in 2 to 4 sections, of 20 steps if there are so many."""

OVERSUBSCRIBED = 0.05
"""Cores are oversubscribed if a rank is ready to run, but without a core, during this fraction of its own time."""

MAD_OF_NORMAL = 1.4826
"""Standard deviation of a normal distribution, in median absolute deviations."""


@dataclass(frozen=True)
class RankTimes:
    """Times of one rank.

    Attributes:
        quantiles: ``p50``, ``p90`` and ``max`` of its measured steps, in seconds.
        own_s: Own time of its watched steps: without waiting for other ranks, in seconds.
        durations_s: Durations of the watched steps, in seconds.
        data_wait_s: Time that it waited for its data in the same steps.
        without_core_s: Time in which it was ready and other programs had its core, in the same steps; on CPUs only.
        watched_p50_s: Median duration of its watched ordinary steps; None if there is none.
        unwatched_p50_s: Median duration of its other ordinary steps; None if there is none.
        on_cpu: Whether it trains on a CPU.
        includes_cpu_work: Whether the own time is at least the work of the CPU. It is on a CPU, and with a profile.
    """

    rank: int
    quantiles: Mapping[str, float]
    own_s: Sequence[float] = ()
    durations_s: Sequence[float] = ()
    data_wait_s: Sequence[float] = ()
    without_core_s: Sequence[float] = ()
    watched_p50_s: float | None = None
    unwatched_p50_s: float | None = None
    on_cpu: bool = False
    includes_cpu_work: bool = False
    host: str = field(default_factory=socket.gethostname)


def include_cpu_work(times: RankTimes, entry: Mapping[str, Any]) -> RankTimes:
    """Return the times of a rank with own times that are at least the work of its CPU.

    The GPU of a rank also waits if the CPU of another rank launches its kernels later. The own CPU may be as busy, so
    without its work the own time would be too short. The profiler makes a step longer. So the CPU's fraction of the
    profiled step counts, and not its time.

    Args:
        times: Times of the rank.
        entry: What the profiler measured on the rank: ``cpu_busy_ms`` of a step of ``step_ms``, both with the overhead
            of the profiler. Without a GPU ``cpu_busy_ms`` is None, and the times are unchanged.
    """
    busy_ms = entry["cpu_busy_ms"]
    if busy_ms is None:
        return times
    share = min(1.0, busy_ms / entry["step_ms"])
    own = [max(own, share * step) for own, step in zip(times.own_s, times.durations_s, strict=True)]
    return replace(times, own_s=own, includes_cpu_work=True)


def step_times(ranks: Sequence[RankTimes]) -> list[dict[str, Any]]:
    """Return ``metrics.step_times_by_rank`` of the record."""
    return [
        {
            "rank": rank.rank,
            **{f"{name}_s": value for name, value in rank.quantiles.items()},
            "watched_p50_s": rank.watched_p50_s,
            "unwatched_p50_s": rank.unwatched_p50_s,
            "own_ms": 1000 * statistics.median(rank.own_s) if rank.own_s else None,
        }
        for rank in ranks
    ]


def find_stragglers(ranks: Sequence[RankTimes]) -> list[dict[str, Any]] | None:
    """Return ``metrics.stragglers`` of the record, the slowest first; None if too few steps were watched.

    Each rank is compared with the median of the others in the same steps.
    """
    steps = min((len(rank.own_s) for rank in ranks), default=0)
    if len(ranks) < 2 or steps < (MIN_STEPS_CPU if ranks[0].on_cpu else MIN_STEPS):
        return None
    found = [pair for rank in ranks if (pair := _straggler(rank, [one for one in ranks if one is not rank]))]
    return [entry for _, entry in sorted(found, key=lambda pair: pair[0], reverse=True)]


def _straggler(rank: RankTimes, others: Sequence[RankTimes]) -> tuple[float, dict[str, Any]] | None:
    """Return by how many seconds a rank is slower than the others, and its entry; None if it is no straggler."""
    usual = [statistics.median(step) for step in zip(*(other.own_s for other in others), strict=True)]
    excess = [own - other for own, other in zip(rank.own_s, usual, strict=True)]
    typical, middle = statistics.median(usual), statistics.median(excess)
    floor_s, share = (MIN_EXCESS_CPU_S, SLOWER_CPU) if rank.on_cpu else (MIN_EXCESS_S, SLOWER)
    least = max(floor_s, share * typical)
    if middle < least or signed_rank_score(excess) < SIGNIFICANT or not _is_consistent(excess, least):
        return None
    own = statistics.median(rank.own_s)
    known = all(member.includes_cpu_work for member in (rank, *others))
    at_least = "" if known else "at least "
    return middle, {
        "rank": rank.rank,
        "gpu": None,
        "host": rank.host,
        "slower_by_pct": 100 * middle / typical if typical > 0 else None,
        "is_upper_bound": not known,
        "evidence": f"its own time is {at_least}{1000 * own:,.1f} ms a step, that of the others {at_least}"
        f"{1000 * typical:,.1f} ms"
        + ("" if known else NO_CPU_WORK)
        + _data_wait(rank, others, middle)
        + _load(rank, own),
    }


def _is_consistent(excess: Sequence[float], least: float) -> bool:
    """Return whether a rank is slow in the whole training, and not only disturbed in some steps."""
    middle, count = statistics.median(excess), len(excess)
    spread = MAD_OF_NORMAL * statistics.median(abs(value - middle) for value in excess)
    sections = max(2, min(MAX_SECTIONS, count // SECTION_STEPS))
    bounds = [count * section // sections for section in range(sections + 1)]
    return middle >= MIN_EFFECT * spread and all(
        statistics.median(excess[start:end]) >= least / 2 for start, end in pairwise(bounds)
    )


def signed_rank_score(differences: Sequence[float]) -> float:
    """Return the score of Wilcoxon's signed-rank test: standard normal if the differences are symmetric around 0."""
    count = len(differences)
    ordered = sorted(differences, key=abs)
    positive = sum(rank for rank, value in enumerate(ordered, start=1) if value > 0)
    return (positive - count * (count + 1) / 4) / math.sqrt(count * (count + 1) * (2 * count + 1) / 24)


def _load(rank: RankTimes, own_s: float) -> str:
    """Return that cores are oversubscribed, if the rank was without one."""
    lost = statistics.median(rank.without_core_s) if rank.without_core_s else 0.0
    if lost < OVERSUBSCRIBED * own_s:
        return ""
    return (
        f"; cores are oversubscribed: it also waits {1000 * lost:,.1f} ms a step for a core, so other programs may be "
        "the cause"
    )


def _data_wait(rank: RankTimes, others: Sequence[RankTimes], excess_s: float) -> str:
    """Return that the rank waits for its data, if this is most of its excess."""
    own = statistics.median(rank.data_wait_s)
    usual = statistics.median(statistics.median(other.data_wait_s) for other in others)
    if own - usual < excess_s / 2:
        return ""
    return f"; it waits {1000 * own:,.1f} ms for its data, the others {1000 * usual:,.1f} ms"

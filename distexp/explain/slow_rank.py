"""The rank that the others wait for: in which part it takes longer, and whether its CPU does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distexp.explain.step_profile import RankStep, StepProfile

SLOWER = 0.3
"""Fraction of the waiting by which a rank must take longer than the others to be its cause."""

MISSING_CORE = 0.5
"""Fraction of its excess that a rank must be without a core longer than the others, so that this is its cause."""

LOCAL_PARTS = ("matmul", "other_kernels", "launch_idle", "data_wait", "optimizer", "host")
"""Parts in which a rank does not depend on the others."""


@dataclass(frozen=True)
class SlowPart:
    """The part in which the slowest rank exceeds the others most.

    Attributes:
        part: Name of the part.
        excess_ms: By how much it exceeds the mean of the others.
    """

    part: str
    excess_ms: float


def slow_part(profile: StepProfile) -> SlowPart:
    """Return the part in which the slowest rank exceeds the others most. With a single rank nothing exceeds."""
    slowest, others = profile.slowest, _others(profile)
    if not others:
        return SlowPart(LOCAL_PARTS[0], 0.0)
    excess = {name: slowest.time_ms(name) - _mean([rank.time_ms(name) for rank in others]) for name in LOCAL_PARTS}
    name = max(excess, key=excess.__getitem__)
    return SlowPart(name, excess[name])


def is_one_rank_slow(profile: StepProfile) -> bool:
    """Return whether one part of the slowest rank is the cause of the waiting."""
    return slow_part(profile).excess_ms >= SLOWER * max(rank.time_ms("waiting") for rank in profile.ranks)


def had_no_core(profile: StepProfile) -> bool:
    """Return whether the slowest rank is slower because other programs had its core, so not in every step."""
    longer_ms = without_core_excess_ms(profile)
    return longer_ms is not None and longer_ms > 0 and longer_ms >= MISSING_CORE * slow_part(profile).excess_ms


def without_core_excess_ms(profile: StepProfile) -> float | None:
    """Return how much longer the slowest rank is without a core than the others; None if unknown."""
    own, others = profile.slowest.without_core_ms, [rank.without_core_ms for rank in _others(profile)]
    known = [time for time in others if time is not None]
    return None if own is None or not known or len(known) < len(others) else own - _mean(known)


def are_others_ahead(profile: StepProfile) -> bool:
    """Return whether the CPUs of the other ranks are as slow, and only ahead of that of the slowest rank.

    A GPU whose CPU is ahead waits in collectives, and is not idle between kernels. Its CPU also works for nearly the
    whole step. If the slowest rank had a slower CPU, the CPUs of the others would wait for their GPUs.

    The time of the CPU is that of a profiled step, and the waiting is without the overhead of the profiler. So this
    compares shares of the step.
    """
    if slow_part(profile).part != "launch_idle" or not is_one_rank_slow(profile):
        return False
    busier = _busier_by(profile)
    waiting = max(rank.time_ms("waiting") / rank.step_ms for rank in profile.ranks)
    return busier is not None and busier < SLOWER * waiting


def describe_excess(profile: StepProfile) -> str:
    """Return by how many milliseconds the slowest rank exceeds the others in its slow part.

    The GPUs of the others are less idle, also because they wait in collectives. So if the part is launch idle, the
    rank is slower by at most what its CPU works longer than theirs.
    """
    slow = slow_part(profile)
    if slow.part != "launch_idle":
        return f"{slow.excess_ms:,.1f} ms"
    busier = _busier_by(profile)
    if busier is None:
        return f"up to {slow.excess_ms:,.1f} ms"
    return f"{min(slow.excess_ms, busier * profile.slowest.step_ms):,.1f} ms"


def _busier_by(profile: StepProfile) -> float | None:
    """Return by which fraction of a step the CPU of the slowest rank works longer than the others; None: unknown."""
    busy, others = profile.slowest.cpu_busy_share, [rank.cpu_busy_share for rank in _others(profile)]
    known = [share for share in others if share is not None]
    return None if busy is None or len(known) < len(others) else busy - _mean(known)


def _others(profile: StepProfile) -> list[RankStep]:
    slowest = profile.slowest
    return [rank for rank in profile.ranks if rank is not slowest]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

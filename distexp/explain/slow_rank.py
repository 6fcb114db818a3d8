"""The rank that the others wait for: in which part it takes longer, and whether its CPU does."""

from __future__ import annotations

from collections.abc import Sequence

from distexp.explain.step_profile import RankStep, StepProfile

SLOWER = 0.3
"""Fraction of the waiting by which a rank must take longer than the others to be its cause."""


def slower_by(profile: StepProfile) -> tuple[str, float]:
    """Return the part in which the slowest rank exceeds the others most, and by how many milliseconds."""
    slowest, others = profile.slowest, _others(profile)
    names = ("matmul", "other_kernels", "launch_idle", "data_wait", "optimizer", "host")
    if not others:
        return names[0], 0.0
    more = {name: slowest.time(name) - _mean([rank.time(name) for rank in others]) for name in names}
    name = max(more, key=lambda each: more[each])
    return name, more[name]


def is_one_rank_slow(profile: StepProfile) -> bool:
    """Return whether one part of the slowest rank is the cause of the waiting."""
    return slower_by(profile)[1] >= SLOWER * max(rank.time("waiting") for rank in profile.ranks)


def are_others_ahead(profile: StepProfile) -> bool:
    """Return whether the CPUs of the other ranks are as slow, and only ahead of that of the slowest rank.

    A GPU whose CPU is ahead waits in collectives, and is not idle between kernels. Its CPU also works for nearly the
    whole step. If the slowest rank had a slower CPU, the CPUs of the others would wait for their GPUs.

    The time of the CPU is that of a profiled step, and the waiting is without the overhead of the profiler. So this
    compares shares of the step.
    """
    if slower_by(profile)[0] != "launch_idle" or not is_one_rank_slow(profile):
        return False
    busier = _busier_by(profile)
    waiting = max(rank.time("waiting") / rank.step_ms for rank in profile.ranks)
    return busier is not None and busier < SLOWER * waiting


def describe_excess(profile: StepProfile) -> str:
    """Return by how many milliseconds the slowest rank exceeds the others in the part of ``slower_by``.

    The GPUs of the others are less idle, also because they wait in collectives. So if the part is launch idle, the
    rank is slower by at most what its CPU works longer than theirs.
    """
    part, more_ms = slower_by(profile)
    if part != "launch_idle":
        return f"{more_ms:,.1f} ms"
    busier = _busier_by(profile)
    if busier is None:
        return f"up to {more_ms:,.1f} ms"
    return f"{min(more_ms, busier * profile.slowest.step_ms):,.1f} ms"


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

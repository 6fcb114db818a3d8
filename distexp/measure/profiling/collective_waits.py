"""Waiting for the slowest rank in collectives.

A collective ends on all ranks at the same time. So the rank with the shortest duration started last, and the others
waited for it. No clock is compared between machines, only durations.

The profiler does not record the process group of gloo's collectives. So nothing is known about the waiting if such
ranks are in several groups, as with ``hybrid_shard``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distexp.measure.profiling.chrome_trace import TraceCollective
from distexp.measure.profiling.intervals import Interval

Key = tuple[str, str]
"""Kind of a collective, and the ranks of its process group; empty: unknown."""
Durations = Mapping[Key, Sequence[float]]
"""Durations of the collectives of a rank in seconds, in the order of their starts."""

ONE_SIDED = ("send_recv", "send", "recv", "broadcast", "reduce", "gather", "scatter")
"""Kinds in which a rank may end before another has started."""


def durations_of(collectives: Sequence[TraceCollective], *, several_groups: bool = False) -> dict[Key, list[float]]:
    """Return the durations of the collectives in which all ranks wait for each other.

    Args:
        collectives: Collectives of a rank.
        several_groups: Whether the rank is in several process groups. Then collectives of unknown groups are left out.
    """
    found: dict[Key, list[float]] = {}
    for collective in sorted(collectives, key=lambda collective: collective.when):
        if collective.kind not in ONE_SIDED and (collective.group or not several_groups):
            start, end = collective.when
            found.setdefault((collective.kind, collective.group), []).append(end - start)
    return found


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective on one rank, divided into waiting and transfer."""

    kind: str
    wait: Interval  # until the slowest rank starts
    transfer: Interval


def split_collectives(collectives: Sequence[TraceCollective], ranks: Sequence[Durations]) -> list[Transfer]:
    """Divide the collectives of a rank into waiting and transfer, in the order of their starts.

    Args:
        collectives: Collectives of the rank.
        ranks: Durations of all ranks. Ranks of other process groups have other keys. If ranks of one group have
            different numbers of collectives, nothing is known about their waiting.
    """
    shortest = {key: _shortest([times[key] for times in ranks if key in times]) for rank in ranks for key in rank}
    positions: dict[Key, int] = {}
    found: list[Transfer] = []
    for collective in sorted(collectives, key=lambda collective: collective.when):
        key = collective.kind, collective.group
        position = positions[key] = positions.get(key, -1) + 1
        durations = shortest.get(key)
        start, end = collective.when
        started_last = start if durations is None else max(start, end - durations[position])
        found.append(Transfer(collective.kind, (start, started_last), (started_last, end)))
    return found


def _shortest(ranks: Sequence[Sequence[float]]) -> list[float] | None:
    if len({len(rank) for rank in ranks}) != 1:
        return None
    return [min(values) for values in zip(*ranks, strict=True)]

"""What a table says in words, computed from its rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from distexp.report.figures import MEMORIES, SPEED
from distexp.report.overview import Overview
from distexp.report.repeats import Group, Spread, within_spread


def sentences(overview: Overview) -> Iterator[str]:
    """The sentences under a table."""
    yield from _fastest(overview)
    yield from _smallest(overview)
    yield from _scaling(overview)
    yield from _repeats(overview)
    yield from _outcomes(overview)


def memory_figure(overview: Overview) -> str | None:
    """The figure that stands for memory here: the first of MEMORIES that a completed run has."""
    done = [row for row in overview.rows if row.completed]
    return next((name for name in MEMORIES if any(row.figures[name] is not None for row in done)), None)


def pareto_fronts(overview: Overview, memory: str) -> list[tuple[list[Group], int]]:
    """For each model on its data, what no other training beats in both memory and speed, and of how many.

    The smallest stands first.
    """
    alike: dict[tuple[str, str], list[Group]] = {}
    for group in overview.groups:
        if group.completed and group.figure(memory) and group.figure(SPEED):
            key = str(group.setting("model")), str(group.setting("dataset"))
            alike.setdefault(key, []).append(group)
    return [(_front(groups, memory), len(groups)) for groups in alike.values()]


def _front(groups: Sequence[Group], memory: str) -> list[Group]:
    known = [
        (size.mean, -speed.mean, n) for n, group in enumerate(groups)
        if (size := group.figure(memory)) and (speed := group.figure(SPEED))
    ]  # fmt: skip
    front: list[Group] = []
    best = math.inf
    for _, slowness, n in sorted(known):
        if slowness < best:
            best = slowness
            front.append(groups[n])
    return front


def _ranked(overview: Overview, name: str, *, largest: bool) -> list[tuple[Group, Spread]]:
    found = [(group, group.figure(name)) for group in overview.groups if group.completed]
    known = [(group, figure) for group, figure in found if figure is not None]
    return sorted(known, key=lambda pair: pair[1].mean, reverse=largest)


def _fastest(overview: Overview) -> Iterator[str]:
    ranked = _ranked(overview, SPEED, largest=True)
    if len(ranked) > 1:
        (best, speed), (second, next_speed) = ranked[:2]
        gain = f"{speed.mean / next_speed.mean:.2f}x of" if next_speed.mean else "against 0 for"
        yield (
            f"Fastest: {overview.name(best)} with {speed.mean:,.1f} samples/s, {gain} "
            f"{overview.name(second)}{_chance(speed, next_speed)}."
        )


def _smallest(overview: Overview) -> Iterator[str]:
    name = memory_figure(overview)
    ranked = _ranked(overview, name, largest=False) if name else []
    if name and len(ranked) > 1:
        (best, memory), (second, next_memory) = ranked[:2]
        if f"{memory.mean:.0f}" == f"{next_memory.mean:.0f}":
            both = f"{overview.name(best)} and {overview.name(second)}"
            yield f"Smallest {MEMORIES[name]}: {both} with {memory.mean:,.0f} MiB each."
            return
        yield (
            f"Smallest {MEMORIES[name]}: {overview.name(best)} with {memory.mean:,.0f} MiB, against "
            f"{next_memory.mean:,.0f} MiB of {overview.name(second)}{_chance(memory, next_memory)}."
        )


def _chance(one: Spread, other: Spread) -> str:
    """What the spread says about a difference."""
    within = within_spread(one, other)
    if within is None:
        return ""
    return "; the difference is within the spread" if within else "; the difference is beyond the spread"


def _scaling(overview: Overview) -> Iterator[str]:
    if overview.reference is not None:
        yield f"Scale is samples/s against {overview.name(overview.reference)}."
    if overview.series:
        yield "Efficiency is ideal time over real time, against the fewest workers of the same configuration."


def _repeats(overview: Overview) -> Iterator[str]:
    counts = [len(group.counted) for group in overview.groups if group.completed]
    if any(count > 1 for count in counts):
        yield "n runs of the same training make one row: mean ± sample standard deviation."
    elif len(counts) > 1:
        yield "Each row is one run: repeat it (train.seed=1,2,3) to know the spread."
    mixed = [group for group in overview.groups if len({row.record.run.git_sha for row in group.rows}) > 1]
    if mixed:
        yield f"The repeats of {', '.join(overview.name(group) for group in mixed[:3])} ran different code."


def _outcomes(overview: Overview) -> Iterator[str]:
    counts = Counter(row.record.status for row in overview.rows if not row.completed)
    if counts:
        each = ", ".join(f"{count} {status}" for status, count in counts.items())
        yield f"{sum(counts.values())} of {len(overview.rows)} runs did not complete: {each}."

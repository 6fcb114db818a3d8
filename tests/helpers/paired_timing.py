"""How two things are timed against each other on a machine that others use too."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median


def paired_ratios(ours: Callable[[], float], theirs: Callable[[], float], repeats: int, turns: int = 1) -> list[float]:
    """The median of our seconds over that of theirs, several times.

    Both take turns, and the one that begins changes, so that both meet the same noise.
    """
    ratios = []
    for repeat in range(repeats):
        own, other = [], []
        for turn in range(turns):
            if (repeat + turn) % 2:
                other.append(theirs())
                own.append(ours())
            else:
                own.append(ours())
                other.append(theirs())
        ratios.append(median(own) / median(other))
    return ratios


def assert_ratio(measure: Callable[[], list[float]], at_most: float) -> None:
    """The median of the ratios holds; the whole measurement is taken again once where it does not."""
    told = []
    for _ in range(2):
        ratios = measure()
        told.append(f"median {median(ratios):.3f} of {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
        print(told[-1])
        if median(ratios) <= at_most:
            return
    raise AssertionError(f"more than {at_most:g}, twice: {'; '.join(told)}")

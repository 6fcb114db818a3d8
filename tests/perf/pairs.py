"""How two things are timed against each other on a machine that others use too."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median


def paired_ratios(ours: Callable[[], float], theirs: Callable[[], float], repeats: int) -> list[float]:
    """Our seconds over theirs, pair by pair: first one, then the other, so that both meet the same noise."""
    ratios = []
    for turn in range(repeats):
        if turn % 2:
            other, own = theirs(), ours()
        else:
            own, other = ours(), theirs()
        ratios.append(own / other)
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

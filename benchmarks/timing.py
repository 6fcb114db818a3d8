"""Compare the run times of two functions on a machine that other programs use too."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median


def paired_ratios(ours: Callable[[], float], theirs: Callable[[], float], repeats: int, turns: int = 1) -> list[float]:
    """Return ``repeats`` ratios of the median time of ``ours`` to that of ``theirs``.

    Args:
        ours: runs once and returns its time in seconds.
        theirs: the function to compare with.
        repeats: number of ratios.
        turns: calls of each function per ratio. They alternate, and so does the order, so that both meet equal noise.
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


def print_ratios(name: str, ratios: list[float]) -> None:
    """Print the median ratio and all ratios."""
    print(f"{name}: median ratio {median(ratios):.3f} of {', '.join(f'{ratio:.3f}' for ratio in ratios)}")

"""The numbers that decide how thorough a search is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchRules:
    """Numbers that decide how thorough a search is.

    Attributes:
        steps: Measured steps of a first trial.
        growth: Factor of the steps from one rung of finalists to the next.
        wave: Families that are tried before the forecasts are scaled again.
        families: Families whose neighbors are tried.
        near: Most that a family's score may exceed the best one if its neighbors are tried, relative to it.
        neighbor_rounds: Most rounds of neighbors.
        finalists: Candidates that are tried again.
        close: Most that the score of a finalist may exceed the best one, relative to it. The second is always one.
        challengers: Most candidates with one trial that are repeated after the finalists.
        doubt: How much better than its scaled forecast a family may be, in standard deviations of the forecasts' error.
        least_error: Smallest error of the forecasts that is assumed, as a standard deviation of their logarithm.
    """

    steps: int = 5
    growth: int = 2
    wave: int = 4
    families: int = 4
    near: float = 0.25
    neighbor_rounds: int = 4
    finalists: int = 4
    close: float = 0.1
    challengers: int = 4
    doubt: float = 2.0
    least_error: float = 0.45


DEFAULT_RULES = SearchRules()

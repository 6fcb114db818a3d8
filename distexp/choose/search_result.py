"""The batches of trials of a search, and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distexp.choose.candidate import Candidate, Trial


@dataclass(frozen=True)
class PlannedTrial:
    """A trial to run.

    Attributes:
        candidate: The configuration to try.
        steps: Number of measured steps.
    """

    candidate: Candidate
    steps: int


TryAll = Callable[[Sequence[PlannedTrial]], Sequence[Trial]]
"""Function that runs a batch of trials, and returns their results in the same order."""


@dataclass(frozen=True)
class Rung:
    """A batch of trials that has ended.

    Attributes:
        name: Why it was run: ``families``, ``neighbors``, ``repeats`` or ``finalists``.
        trials: What was tried, in order.
        gpu_seconds: Cost of the batch.
    """

    name: str
    trials: tuple[PlannedTrial, ...]
    gpu_seconds: float


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        winner: The best candidate; None if none completed.
        candidates: All candidates, with their trials.
        rungs: The batches of trials, in order.
        stopped: Why the search ended early, as a sentence; empty if it ended by itself.
        statement: What prevents a winner, with the nearest configuration; empty if there is a winner.
    """

    winner: Candidate | None
    candidates: tuple[Candidate, ...]
    rungs: tuple[Rung, ...] = ()
    stopped: str = ""
    statement: str = ""

    @property
    def gpu_seconds(self) -> float:
        """Return the cost of all trials."""
        return sum(rung.gpu_seconds for rung in self.rungs)

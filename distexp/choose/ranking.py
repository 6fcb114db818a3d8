"""The order of measured candidates, and the margin between two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from distexp.choose.candidate import Candidate, Objective, Status


def ranked(candidates: Sequence[Candidate], objective: Objective) -> list[Candidate]:
    """Return the candidates with a score, the best one first. If scores are equal, the faster one is first."""
    tried = [
        candidate
        for candidate in candidates
        if candidate.status is Status.TRIED and candidate.score(objective) is not None
    ]
    return sorted(tried, key=lambda each: (each.score(objective) or 0.0, each.score(Objective.THROUGHPUT) or 0.0))


@dataclass(frozen=True)
class Margin:
    """How much worse one candidate is than another.

    Attributes:
        value: Difference of the scores, relative to the score of the better one.
        error: Twice the standard error of ``value``; None if no trial of both was repeated.
    """

    value: float
    error: float | None


def margin_between(winner: Candidate, second: Candidate, objective: Objective) -> Margin | None:
    """Return by how much the second candidate is worse; None if one of both has no score.

    The noise of a trial is taken to shrink with the root of its steps. It is estimated from the repeated trials of
    both candidates.
    """
    winner_score, second_score = winner.score(objective), second.score(objective)
    if not winner_score or second_score is None:
        return None
    value = second_score / winner_score - 1
    variance = _variance_of_a_step([(winner, winner_score), (second, second_score)], objective)
    if variance is None:
        return Margin(value, None)
    winner_steps, second_steps = (sum(trial.steps for trial in candidate.completed) for candidate in (winner, second))
    return Margin(value, 2 * (1 + value) * sqrt(variance / winner_steps + variance / second_steps))


def _variance_of_a_step(scored: Sequence[tuple[Candidate, float]], objective: Objective) -> float | None:
    """Return the relative variance of the score of a trial with one step; None without repeated trials.

    Args:
        scored: Candidates with their mean scores.
        objective: The objective of the scores.
    """
    squares, freedom = 0.0, 0
    for candidate, mean in scored:
        scores = [(trial.score(objective), trial.steps) for trial in candidate.completed]
        squares += sum(steps * (score / mean - 1) ** 2 for score, steps in scores if score is not None)
        freedom += len(scores) - 1
    return squares / freedom if freedom else None

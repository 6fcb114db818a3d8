"""Which candidates a search repeats: the best one, and the rival that may be better within the noise."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, sqrt
from operator import itemgetter

from distexp.choose.candidate import Candidate, Objective
from distexp.choose.ranking import by_score, deviation_of_a_step
from distexp.choose.search_rules import SearchRules
from distexp.statistics.noise import Deviation


def candidates_to_repeat(candidates: Sequence[Candidate], objective: Objective, rules: SearchRules) -> list[Candidate]:
    """Return the best candidate and its strongest rival, or the one of both with fewer steps; none if all is certain.

    The best one is repeated in any case, because the best of many short trials was often only lucky. It is repeated
    first, because its repeat may show that no rival needs one.
    """
    tried = by_score(candidates, objective)
    if not tried:
        return []
    best, others = tried[0], tried[1:]
    if len(best.completed) < 2:
        return [best]
    noise = deviation_of_a_step(candidates, objective, rules)
    rivals = [(_possible_gain(best, other, objective, noise), other) for other in others]
    gain, rival = max(rivals, key=itemgetter(0), default=(0.0, best))
    if gain <= rules.negligible:
        return []
    steps = _steps(best), _steps(rival)
    return [each for each, own in zip((best, rival), steps, strict=True) if own == min(steps)]


def _possible_gain(best: Candidate, other: Candidate, objective: Objective, noise: Deviation) -> float:
    """Return by how much another candidate may be better, at the end of the 95 % confidence interval."""
    score, other_score = best.score(objective), other.score(objective)
    assert score, "both were tried"
    assert other_score, "both were tried"
    noise_of_ratio = noise.noise_of_mean(1) * sqrt(1 / _steps(best) + 1 / _steps(other))
    # The noise is that of the logarithm. So on a busy machine the worst candidates are not the strongest rivals.
    return 1 - other_score / score * exp(-noise_of_ratio)


def _steps(candidate: Candidate) -> int:
    return sum(trial.steps for trial in candidate.completed)

"""The order of measured candidates, and the margin between two of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log, log1p, sqrt
from operator import attrgetter

from distexp.choose.candidate import Candidate, Objective, Status
from distexp.choose.search_rules import DEFAULT_RULES, SearchRules
from distexp.statistics.noise import CPU_MEMORY_MIB, SINGLE_CPU_RUN, Deviation, distinct_ratio


def by_score(candidates: Iterable[Candidate], objective: Objective) -> list[Candidate]:
    """Return the candidates with a score, the best one first. If scores are equal, the faster one is first."""
    tried = [
        candidate
        for candidate in candidates
        if candidate.status is Status.TRIED and candidate.score(objective) is not None
    ]
    tried.sort(key=lambda candidate: candidate.score(Objective.THROUGHPUT) or 0.0)
    return sorted(tried, key=lambda candidate: candidate.score(objective) or 0.0)


def ranked(candidates: Iterable[Candidate], objective: Objective) -> list[Candidate]:
    """Return the candidates with a score: those with the longest trial first, then by their scores.

    A search repeats only the best candidates, with longer trials. The others have one short trial, and the best of
    many short trials was often only lucky.
    """
    return sorted(by_score(candidates, objective), key=attrgetter("longest_steps"), reverse=True)


@dataclass(frozen=True)
class Margin:
    """How much worse one candidate is than another.

    Attributes:
        value: Difference of the scores, relative to the score of the winner.
        noise: Half of the 95 % confidence interval of the logarithm of their ratio; None if no trial was repeated. With
            the logarithm, a candidate that is several times slower is not equal because of a large noise.
    """

    value: float
    noise: float | None

    @property
    def error(self) -> float | None:
        """Return half of the 95 % confidence interval of ``value``, for a small noise; None if it is unknown."""
        return None if self.noise is None else (1 + self.value) * self.noise

    @property
    def is_noise(self) -> bool:
        """Return whether the difference is within the noise. If the noise is unknown, it is not."""
        return self.noise is not None and abs(log1p(self.value)) <= self.noise


def margin_between(
    winner: Candidate, other: Candidate, objective: Objective, candidates: Iterable[Candidate] = ()
) -> Margin | None:
    """Return by how much another candidate is worse than the winner; None if one of both has no score.

    The variance of a trial is taken to be in inverse proportion to its steps. It is that of ``deviation_of_a_step``.
    Speed and memory on CPUs have at least the noise that the report assumes.

    Args:
        winner: The winner.
        other: The candidate to compare.
        objective: What both are compared by.
        candidates: Further candidates, whose repeated trials show the noise too.
    """
    winner_score, other_score = winner.score(objective), other.score(objective)
    if not winner_score or other_score is None:
        return None
    value = other_score / winner_score - 1
    shown = list(dict.fromkeys((winner, other, *candidates)))
    step = deviation_of_a_step(shown, objective) if squared_deviations(shown, objective)[1] else None
    least = _least_noise_on_cpus(winner, other, objective) if winner.on_cpus else None
    if step is None:
        return Margin(value, least)
    root = sqrt(sum(1 / sum(trial.steps for trial in candidate.completed) for candidate in (winner, other)))
    return Margin(value, max(root * step.noise_of_mean(1), least or 0.0))


def _least_noise_on_cpus(winner: Candidate, other: Candidate, objective: Objective) -> float | None:
    """Return the smallest noise of a margin on CPUs, as Margin.noise; None if it has no smallest one.

    Other programs share the cores. So a time that was measured once has the noise of a run without repeats. So has an
    energy or a cost, which follows from the time.
    """
    if objective is Objective.MEMORY:
        return log1p(sqrt(2) * CPU_MEMORY_MIB / (winner.score(objective) or CPU_MEMORY_MIB))
    is_single = min(len(winner.completed), len(other.completed)) < 2
    return log(distinct_ratio(SINGLE_CPU_RUN)) if is_single else None


def deviation_of_a_step(
    candidates: Sequence[Candidate], objective: Objective, rules: SearchRules = DEFAULT_RULES
) -> Deviation:
    """Return the relative deviation of the score of a trial with one step.

    It is that of the repeated trials, pooled with the usual one, because one or two repeats show little of the noise.
    The memory of a GPU has no usual noise.
    """
    squares, freedom = squared_deviations(candidates, objective)
    if objective is Objective.MEMORY:
        return Deviation(sqrt(squares / max(1, freedom)), max(1, freedom))
    usual = rules.usual_noise**2 * rules.steps * rules.usual_trials
    return Deviation(sqrt((squares + usual) / (freedom + rules.usual_trials)), freedom + rules.usual_trials)


def squared_deviations(candidates: Iterable[Candidate], objective: Objective) -> tuple[float, int]:
    """Return the sum of the squared relative deviations of repeated trials, in steps, and its degrees of freedom."""
    squares, freedom = 0.0, 0
    for candidate in candidates:
        mean = candidate.score(objective)
        scores = [(trial.score(objective), trial.steps) for trial in candidate.completed]
        known = [(score, steps) for score, steps in scores if score is not None]
        if mean and len(known) > 1:
            squares += sum(steps * (score / mean - 1) ** 2 for score, steps in known)
            freedom += len(known) - 1
    return squares, freedom

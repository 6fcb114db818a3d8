"""The order of measured candidates, the margin between two of them, and the results of a search."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import expm1, log, log1p, sqrt
from operator import attrgetter

from distexp.choose.candidate import DEFAULT_RULES, Candidate, Metrics, Objective, SearchRules, Trial
from distexp.config import Config
from distexp.statistics.noise import SINGLE_CPU_RUN, Deviation, cpu_memory_noise, distinct_ratio
from distexp.strategies.base import load_strategy
from distexp.strategies.traits import CUSTOM_COMPLEXITY


def by_score(candidates: Iterable[Candidate], objective: Objective) -> list[Candidate]:
    """Return the candidates with a score, the best one first. If scores are equal, the faster one is first."""
    tried = [each for each in candidates if each.is_tried and each.score(objective) is not None]
    return sorted(tried, key=lambda each: (each.known_score(objective), each.score(Objective.THROUGHPUT) or 0.0))


def ranked(candidates: Iterable[Candidate], objective: Objective) -> list[Candidate]:
    """Return the candidates with a score: those with the longest trial first, then by their scores.

    A search repeats only the best candidates, with longer trials. The others have one short trial, and the best of
    many short trials was often only lucky.
    """
    return sorted(by_score(candidates, objective), key=attrgetter("longest_steps"), reverse=True)


@dataclass(frozen=True)
class Margin:
    """How much worse one candidate is than another."""

    value: float  # difference of the scores, relative to the score of the winner
    # Half of the 95 % confidence interval of the logarithm of their ratio; None if no trial was repeated. With the
    # logarithm, a candidate that is several times slower is not equal because of a large noise.
    noise: float | None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the ends of the 95 % confidence interval of ``value``; None if the noise is unknown."""
        if self.noise is None:
            return None
        return expm1(log1p(self.value) - self.noise), expm1(log1p(self.value) + self.noise)

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
    root = sqrt(1 / winner.measured_steps + 1 / other.measured_steps)
    return Margin(value, max(root * step.noise_of_mean(1), least or 0.0))


def _least_noise_on_cpus(winner: Candidate, other: Candidate, objective: Objective) -> float | None:
    """Return the smallest noise of a margin on CPUs, as Margin.noise; None if it has no smallest one.

    Other programs share the cores. So a time that was measured once has the noise of a run without repeats. So has an
    energy or a cost, which follows from the time.
    """
    if objective is Objective.MEMORY:
        noise = sqrt(2) * cpu_memory_noise(trial.process_mib for one in (winner, other) for trial in one.completed)
        return log1p(noise / (winner.score(objective) or noise))
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
        known = candidate.scores(objective)
        if mean and len(known) > 1:
            squares += sum(steps * (score / mean - 1) ** 2 for score, steps in known)
            freedom += len(known) - 1
    return squares, freedom


def mean_metrics(candidate: Candidate) -> Metrics:
    """Return the means over the completed trials of a candidate, weighted by their steps, and the highest peak."""
    trials = candidate.completed
    peaks = [trial.peak_allocated_mib for trial in trials if trial.peak_allocated_mib is not None]
    return Metrics(
        **{name: _mean(trials, name) for name in ("samples_per_second", "step_s", "j_per_sample", "price_per_sample")},
        peak_allocated_mib=max(peaks, default=None),
    )


def _mean(trials: Sequence[Trial], name: str) -> float | None:
    """Return the mean of a value; that of a speed is over the time, so it is the harmonic one."""
    known = [(getattr(trial, name), trial.steps) for trial in trials if getattr(trial, name)]
    if not known:
        return None
    steps = sum(count for _, count in known)
    if name == "samples_per_second":
        return float(steps / sum(count / value for value, count in known))
    return float(sum(value * count for value, count in known) / steps)


def equal_candidates(candidates: Sequence[Candidate], winner: Candidate, objective: Objective) -> list[Candidate]:
    """Return the other candidates whose difference to the winner is within the noise, the best one first."""
    margins = [
        (other, margin_between(winner, other, objective, candidates))
        for other in ranked(candidates, objective)
        if other is not winner
    ]
    return [other for other, margin in margins if margin is not None and margin.is_noise]


def simplest(candidates: Sequence[Candidate]) -> Candidate:
    """Return the simplest of some candidates; of several, the first one."""
    return min(candidates, key=lambda candidate: _complexity(candidate.config))


def _complexity(config: Config | None) -> tuple[int | bool, ...]:
    if config is None:
        return (CUSTOM_COMPLEXITY,)
    strategy = load_strategy(config)
    is_fast, is_checkpointed = config.kernels.name != "reference", bool(config.train.activation_checkpointing)
    option = strategy.option_complexity(config)
    return strategy.own_complexity(), config.offload.enabled, is_checkpointed, is_fast, option


@dataclass(frozen=True)
class PlannedTrial:
    """A trial to run: a candidate, and the number of measured steps."""

    candidate: Candidate
    steps: int


TryAll = Callable[[Sequence[PlannedTrial]], Sequence[Trial]]
"""Function that runs a batch of trials, and returns their results in the same order."""


@dataclass(frozen=True)
class Rung:
    """A batch of trials that has ended."""

    name: str  # why it was run: ``families``, ``neighbors``, ``repeats`` or ``finalists``
    trials: tuple[PlannedTrial, ...]  # what was tried, in order
    gpu_seconds: float  # cost of the batch


@dataclass(frozen=True)
class SearchResult:
    """Result of a search."""

    winner: Candidate | None  # the best candidate; None if none completed
    candidates: tuple[Candidate, ...]  # all candidates, with their trials
    rungs: tuple[Rung, ...] = ()  # the batches of trials, in order
    stopped: str = ""  # why the search ended early, as a sentence; empty if it ended by itself
    statement: str = ""  # what prevents a winner, with the nearest configuration; empty if there is a winner

    @property
    def gpu_seconds(self) -> float:
        """Return the cost of all trials."""
        return sum(rung.gpu_seconds for rung in self.rungs)

"""The end of a search: the winner with its margin, and why the other candidates were not tried."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from distexp.choose.candidate import OUT_OF_MEMORY, Candidate, Objective, Rung, SearchResult, Status
from distexp.system.gpu_models import gpus_with
from distexp.system.units import MIB_PER_GB


def ranked(candidates: Sequence[Candidate], objective: Objective) -> list[Candidate]:
    """Return the candidates with a score, the best one first. If scores are equal, the faster one is first."""
    scored = [(each, each.score(objective)) for each in candidates if each.status is Status.TRIED]

    def key(pair: tuple[Candidate, float | None]) -> tuple[float, float]:
        return pair[1] or 0.0, pair[0].score(Objective.THROUGHPUT) or 0.0

    return [candidate for candidate, _ in sorted((pair for pair in scored if pair[1] is not None), key=key)]


def make_result(
    candidates: Sequence[Candidate], objective: Objective, rungs: Sequence[Rung], stopped: str
) -> SearchResult:
    """Return the result of a search whose trials are done."""
    best = ranked(candidates, objective)
    winner, second = [*best, None, None][:2]
    margin = error = None
    if winner is not None and second is not None:
        margin, error = margin_of(winner, second, objective)
    return SearchResult(
        winner=winner,
        candidates=tuple(candidates),
        gpu_seconds=sum(rung.gpu_seconds for rung in rungs),
        rungs=tuple(rungs),
        second=second,
        margin=margin,
        margin_error=error,
        stopped=stopped,
        statement="" if winner is not None else describe_no_winner(candidates),
    )


def margin_of(winner: Candidate, second: Candidate, objective: Objective) -> tuple[float | None, float | None]:
    """Return by how much the second best is worse, relative to the winner, and twice the standard error of that.

    The noise of a trial is taken to shrink with the root of its steps. It is estimated from the repeated trials of
    both; without repeats it is unknown.
    """
    least, more = winner.score(objective), second.score(objective)
    if not least or more is None:
        return None, None
    margin = more / least - 1
    squares, freedom = 0.0, 0
    for candidate, mean in ((winner, least), (second, more)):
        scores = [(trial.score(objective), trial.steps) for trial in candidate.completed]
        squares += sum(steps * (score / mean - 1) ** 2 for score, steps in scores if score is not None)
        freedom += len(scores) - 1
    if freedom < 1:
        return margin, None
    variance = squares / freedom
    steps = [sum(trial.steps for trial in candidate.completed) for candidate in (winner, second)]
    return margin, 2 * (1 + margin) * sqrt(variance / steps[0] + variance / steps[1])


def describe_no_winner(candidates: Sequence[Candidate]) -> str:
    """Return why no candidate completed, with the configuration that needs the least memory."""
    failed = [each for each in candidates if each.status is Status.FAILED]
    if failed:
        reasons = list(dict.fromkeys(each.reason for each in failed))
        text = f"none of the {len(failed)} trials completed: {reasons[0]}"
        ran_out = [each for each in failed if any(trial.status in OUT_OF_MEMORY for trial in each.trials)]
        nearest = nearest_candidate(ran_out) if len(ran_out) == len(failed) else None
    else:
        nearest = nearest_candidate(candidates)
        text = "no candidate can be tried" if nearest is None else "no candidate fits into the memory"
    if nearest is None:
        reasons = list(dict.fromkeys(each.reason for each in candidates if each.reason))
        return f"{text}: {reasons[0]}" if reasons and not failed else text
    return f"{text}; the nearest one is {describe_nearest(nearest)}"


def nearest_candidate(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the predicted candidate that needs the least memory; None if none is predicted."""
    known = [each for each in candidates if each.predicted is not None and each.predicted.required_mib is not None]
    return min(known, key=lambda each: (each.predicted and each.predicted.required_mib) or 0.0, default=None)


def describe_nearest(candidate: Candidate) -> str:
    """Return the overrides of a candidate, what it needs, and the GPUs on which it fits."""
    predicted = candidate.predicted
    assert predicted is not None, "the caller chose a predicted one"
    needed, most = predicted.required_mib or 0.0, predicted.most_mib or predicted.required_mib or 0.0
    memory = predicted.gpu_memory_mib or predicted.host_memory_mib
    limit = "" if memory is None else f" of {memory / MIB_PER_GB:,.1f} GB"
    text = f"{' '.join(candidate.overrides)}, which needs {needed / MIB_PER_GB:,.1f} GB{limit}"
    if predicted.host_memory_mib is not None:
        return f"{text}: use fewer workers, or a machine with at least {most / MIB_PER_GB:,.1f} GB"
    fitting = gpus_with(most)
    return f"{text}: it fits on {fitting[0]} and larger" if fitting else f"{text}: it fits on no known GPU"

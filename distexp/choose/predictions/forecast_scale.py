"""How the measured scores compare with the forecasts, and which forecasts can still win."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from statistics import fmean, median

from distexp.choose.candidate import CHECKPOINTING, Candidate, Objective, SearchRules, Status
from distexp.choose.predictions.pruning import allowed_if_too_close
from distexp.statistics.noise import expected_gain


def best_score(candidates: Sequence[Candidate], objective: Objective) -> float | None:
    """Return the smallest score of the candidates that were tried; None if there is none."""
    scores = (candidate.score(objective) for candidate in candidates if candidate.status is Status.TRIED)
    return min((score for score in scores if score is not None), default=None)


def forecast_scales(
    candidates: Sequence[Candidate], objective: Objective, applied_to: Candidate | None = None
) -> list[float]:
    """Return score / forecast of each candidate that was tried and has both.

    Args:
        candidates: Any candidates.
        objective: The objective of the search.
        applied_to: Candidate that was not tried, for which the scales are needed. Then they are those that
            ``fewer_launches_factor`` allows for it.
    """
    tried = [candidate for candidate in candidates if candidate.status is Status.TRIED]
    known = [(each, each.score(objective), each.forecast(objective)) for each in tried]
    return [
        score / forecast * (1.0 if applied_to is None else fewer_launches_factor(each, applied_to, objective))
        for each, score, forecast in known
        if score and forecast
    ]


def fewer_launches_factor(known: Candidate, other: Candidate, objective: Objective) -> float:
    """Return by which factor the scale of a measured candidate may be smaller for a larger micro-batch; at most 1.

    A small micro-batch may be slower than its forecast because the CPU launches its kernels too slowly. Such time is in
    proportion to the number of micro-batches. So as much of the time above the forecast as possible is taken for it.
    """
    measured, forecast = known.step_s, known.forecast_s
    is_larger = other.micro_batch > known.micro_batch and objective is not Objective.MEMORY
    if not is_larger or not measured or not forecast or measured <= forecast:
        return 1.0
    return (forecast + (measured - forecast) * known.micro_batch / other.micro_batch) / measured


def useful_forecasts(
    waiting: Sequence[Candidate], candidates: Sequence[Candidate], objective: Objective, rules: SearchRules
) -> list[Candidate]:
    """Return the candidates that may still be the best one, by the errors of the forecasts so far."""
    best = best_score(candidates, objective)
    if best is None:
        return list(waiting)
    return [
        candidate
        for candidate in waiting
        if _may_be_best_of_all(candidate, candidates, best, objective, rules)
        and _may_be_best_of_kernels(candidate, candidates, best, objective, rules)
    ]


def scaled_forecast(candidate: Candidate, candidates: Sequence[Candidate], objective: Objective) -> float | None:
    """Return the score that is expected of a candidate; None if its forecast or every scale is unknown."""
    forecast = candidate.forecast(objective)
    scales = _own_scales(candidate, candidates, objective) or forecast_scales(candidates, objective, candidate)
    return forecast * median(scales) if forecast is not None and scales else None


def _own_scales(candidate: Candidate, candidates: Sequence[Candidate], objective: Objective) -> list[float]:
    """Return the scales of the families that differ only in checkpointing. They have the same error."""
    family = without_checkpointing(candidate)
    same = [other for other in candidates if without_checkpointing(other) == family]
    return forecast_scales(same, objective, candidate)


def _may_be_best_of_all(
    candidate: Candidate, candidates: Sequence[Candidate], best: float, objective: Objective, rules: SearchRules
) -> bool:
    """Return whether a candidate may be the best, by the scales of all families."""
    forecast, scales = candidate.forecast(objective), forecast_scales(candidates, objective, candidate)
    if not forecast or not scales:
        return True
    gain = expected_gain(forecast, best, scales, exact_scale(candidates, objective), rules)
    return gain >= least_gain(candidates, rules)


def _may_be_best_of_kernels(
    candidate: Candidate, candidates: Sequence[Candidate], best: float, objective: Objective, rules: SearchRules
) -> bool:
    """Return whether a candidate may be the best, by the scales of families that differ only in checkpointing.

    A candidate that may not fit must be forecast to be better, and clearly better if it probably does not fit.
    """
    expected = scaled_forecast(candidate, candidates, objective)
    if expected is None or not (candidate.too_close or _own_scales(candidate, candidates, objective)):
        return True
    allowed = allowed_if_too_close(candidate, candidates, rules) if candidate.too_close else 1 + rules.same_kernels
    return expected < best * allowed


def without_checkpointing(candidate: Candidate) -> tuple[str, ...]:
    """Return the family of a candidate, the same with checkpointing and without."""
    return tuple(text for text in candidate.family if not text.startswith(f"{CHECKPOINTING}="))


def exact_scale(candidates: Sequence[Candidate], objective: Objective) -> float | None:
    """Return score / forecast if the forecasts have no error: the score of a second of step time, on average.

    None if no step time was measured.
    """
    if objective is Objective.MEMORY:
        return 1.0
    logarithms = [
        log(score / step_s)
        for candidate in candidates
        if candidate.status is Status.TRIED
        and (score := candidate.score(objective))
        and (step_s := candidate.measured_time(objective))
    ]
    return exp(fmean(logarithms)) if logarithms else None


def least_gain(candidates: Sequence[Candidate], rules: SearchRules) -> float:
    """Return the expected improvement for which a trial is worth its cost, relative to the best score.

    It is the smaller one of ``least_gain`` and of ``gain_of_sweep`` divided by the number of candidates that may be
    tried: in a large space a trial costs a smaller part of the sweep.
    """
    fitting = sum(candidate.status is not Status.PRUNED for candidate in candidates)
    return min(rules.least_gain, rules.gain_of_sweep / max(1, fitting))

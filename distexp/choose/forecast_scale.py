"""How the measured scores compare with the forecasts, and which forecasts can still win."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, log, sqrt
from statistics import fmean, median

from distexp.choose.axis_keys import CHECKPOINTING
from distexp.choose.candidate import Candidate, Objective, Status
from distexp.choose.search_rules import SearchRules


def best_score(candidates: Sequence[Candidate], objective: Objective) -> float | None:
    """Return the smallest score of the candidates that were tried; None if there is none."""
    scores = (candidate.score(objective) for candidate in candidates if candidate.status is Status.TRIED)
    return min((score for score in scores if score is not None), default=None)


def forecast_scales(candidates: Sequence[Candidate], objective: Objective) -> list[float]:
    """Return score / forecast of each candidate that was tried and has both."""
    tried = [candidate for candidate in candidates if candidate.status is Status.TRIED]
    pairs = [(candidate.score(objective), candidate.forecast(objective)) for candidate in tried]
    return [score / forecast for score, forecast in pairs if score and forecast]


def useful_forecasts(
    waiting: Sequence[Candidate], candidates: Sequence[Candidate], objective: Objective, rules: SearchRules
) -> list[Candidate]:
    """Return the candidates that may still be the best one, by the errors of the forecasts so far.

    Args:
        waiting: Candidates whose families were not tried.
        candidates: All candidates.
        objective: The objective of the search.
        rules: How much the forecasts are trusted.
    """
    limit = _largest_useful_forecast(candidates, objective, rules)
    return [
        candidate
        for candidate in waiting
        if (candidate.forecast(objective) or 0.0) < limit and _may_be_best(candidate, candidates, objective, rules)
    ]


def _largest_useful_forecast(candidates: Sequence[Candidate], objective: Objective, rules: SearchRules) -> float:
    """Return the forecast from which a candidate cannot be the best any more."""
    best, scales = best_score(candidates, objective), forecast_scales(candidates, objective)
    if best is None or not scales:
        return inf
    logarithms = [log(scale) for scale in scales]
    center = fmean(logarithms)
    deviation = sqrt(fmean((logarithm - center) ** 2 for logarithm in logarithms))
    return best / exp(center - rules.doubt * max(rules.least_error, deviation))


def _may_be_best(
    candidate: Candidate, candidates: Sequence[Candidate], objective: Objective, rules: SearchRules
) -> bool:
    """Return whether a candidate may be the best, by forecasts that are more certain than those of all families.

    Two families that differ only in checkpointing have the same error. A candidate that may not fit must be forecast
    to be clearly better.
    """
    best, forecast = best_score(candidates, objective), candidate.forecast(objective)
    if best is None or forecast is None:
        return True
    family = without_checkpointing(candidate)
    own = forecast_scales([other for other in candidates if without_checkpointing(other) == family], objective)
    scales = own or forecast_scales(candidates, objective)
    if not scales or not (own or candidate.too_close):
        return True
    allowed = 1 - rules.worthwhile if candidate.too_close else 1 + rules.same_kernels
    return forecast * median(scales) < best * allowed


def without_checkpointing(candidate: Candidate) -> tuple[str, ...]:
    """Return the family of a candidate, the same with checkpointing and without."""
    return tuple(text for text in candidate.family if not text.startswith(f"{CHECKPOINTING}="))

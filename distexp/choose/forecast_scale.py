"""How the measured scores compare with the forecasts, and which forecasts can still win."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, log, sqrt
from statistics import fmean

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


def largest_useful_forecast(candidates: Sequence[Candidate], objective: Objective, rules: SearchRules) -> float:
    """Return the forecast from which a candidate cannot be the best any more, by the errors of the forecasts so far."""
    best, scales = best_score(candidates, objective), forecast_scales(candidates, objective)
    if best is None or not scales:
        return inf
    logarithms = [log(scale) for scale in scales]
    center = fmean(logarithms)
    deviation = sqrt(fmean((logarithm - center) ** 2 for logarithm in logarithms))
    return best / exp(center - rules.doubt * max(rules.least_error, deviation))

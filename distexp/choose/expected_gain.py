"""How much better than the best candidate another one may be, by the errors of the forecasts so far.

The logarithm of score / forecast is taken to be normal over the candidates. Its mean and its variance follow from the
trials, and from what is usual: a forecast that is right on average, with the usual error. With few trials, the usual
values decide, and with many the measured ones. With few trials the distribution is Student's t, whose tails are
heavier: the gains of unlikely candidates are larger than these. So 1 % is a rule that was tested with measured sweeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt
from statistics import NormalDist, fmean

from distexp.choose.candidate import Candidate, Objective, Status
from distexp.choose.search_rules import SearchRules

STANDARD_NORMAL = NormalDist()


def expected_gain(
    forecast: float, best: float, scales: Sequence[float], exact: float | None, rules: SearchRules
) -> float:
    """Return the expected improvement of a candidate, relative to the best score: 0.01 is 1 %.

    Source of the formula: Jones, Schonlau and Welch, *Efficient Global Optimization of Expensive Black-Box Functions*,
    1998, equation 15, for the logarithms of the scores.

    Args:
        forecast: Forecast of the candidate, as of ``Candidate.forecast``.
        best: Best score so far, as of ``Candidate.score``.
        scales: Score / forecast of the candidates that were tried; at least one.
        exact: Score / forecast if the forecasts have no error. If it is unknown, it is taken from the scales.
        rules: What is usual.
    """
    known = exact or exp(fmean(map(log, scales)))
    mean, deviation = _predicted_scale([log(scale / known) for scale in scales], rules)
    distance = (log(best / (forecast * known)) - mean) / deviation
    return deviation * (distance * STANDARD_NORMAL.cdf(distance) + STANDARD_NORMAL.pdf(distance))


def _predicted_scale(logarithms: Sequence[float], rules: SearchRules) -> tuple[float, float]:
    """Return mean and width of the distribution of the logarithm of the next candidate's scale.

    Source of the formula: Gelman et al., *Bayesian Data Analysis*, 3rd edition, section 3.3 (normal data with a
    conjugate prior). If the mean is unknown, one trial shows nothing of the variance, as in section 3.2.
    """
    count, center = len(logarithms), fmean(logarithms)
    weight = rules.usual_scale_trials
    squares = (
        rules.usual_error_trials * rules.usual_error**2
        + sum((each - center) ** 2 for each in logarithms)
        + weight * count / (weight + count) * center**2
    )
    freedom = rules.usual_error_trials + count - (0 if weight else 1)
    variance = squares / freedom * (1 + 1 / (count + weight))
    return center * count / (count + weight), sqrt(variance)


def exact_scale(candidates: Sequence[Candidate], objective: Objective) -> float | None:
    """Return score / forecast if the forecasts have no error: the score of a second of step time, on average.

    None if no step time was measured.

    Args:
        candidates: All candidates. Those that were tried show how the score depends on the step time.
        objective: The objective of the search. The forecast of memory is in the unit of its score.
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

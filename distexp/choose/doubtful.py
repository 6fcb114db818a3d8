"""Trials that a search repeats, because they are far slower than the forecasts let expect.

Other programs can slow down one trial by several times. Without a repeat, the whole family would be left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from distexp.choose.candidate import Candidate, Objective
from distexp.choose.forecast_scale import best_score, forecast_scales
from distexp.choose.ranking import by_score
from distexp.choose.search_rules import SearchRules


def doubtful_candidates(
    candidates: Sequence[Candidate], objective: Objective, rules: SearchRules
) -> Iterator[Candidate]:
    """Yield the candidates with a single trial that contradicts a forecast with which they may be the best."""
    tried, best = by_score(candidates, objective), best_score(candidates, objective)
    for candidate in tried:
        scales = forecast_scales([other for other in tried if other is not candidate], objective)
        forecast, score = candidate.forecast(objective), candidate.score(objective)
        if len(candidate.trials) != 1 or not (scales and forecast and score and best):
            continue
        expected = forecast * median(scales)
        if score >= rules.contradiction * expected and expected <= best * (1 + rules.near):
            yield candidate


def mark_disturbed(candidate: Candidate, objective: Objective, rules: SearchRules) -> None:
    """Mark the first trial of a candidate as disturbed if its repeat is far better. Then it does not count."""
    if len(candidate.completed) != 2:
        return
    first, second = (trial.score(objective) for trial in candidate.completed)
    if first and second and first >= rules.disturbed * second:
        candidate.trials = (replace(candidate.trials[0], disturbed=True), *candidate.trials[1:])

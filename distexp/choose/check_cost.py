"""The expected cost of the check of the losses, which the search leaves in the budget."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import itemgetter

from distexp.choose.candidate import Candidate, Objective, Status
from distexp.choose.loss_check import dropout_overrides, references_of
from distexp.choose.ranking import by_score
from distexp.choose.search_result import PlannedTrial
from distexp.choose.search_rules import DEFAULT_RULES
from distexp.choose.trial_budget import expected_gpu_seconds
from distexp.choose.trial_overrides import EXCLUDED_STEPS


def check_gpu_seconds(candidates: Sequence[Candidate], singles: Sequence[Candidate], objective: Objective) -> float:
    """Return the expected GPU-seconds of the trials that compare the losses of the best candidate so far.

    Before the first trial, the best candidate is the best forecast one. The cost is 0 if the reference has a trial of
    as many steps already, and if there is no reference.

    Args:
        candidates: All candidates of the search.
        singles: Configurations of ``single`` that are no candidates.
        objective: What the best candidate has least of.
    """
    best = _likely_winner(candidates, objective)
    reference = next(references_of(best, candidates, singles), None) if best is not None else None
    if best is None or best.config is None or reference is None:
        return 0.0
    steps = min((trial.steps for trial in best.completed), default=DEFAULT_RULES.steps)
    if dropout_overrides(best):
        missing = [best, reference]
    else:
        known = {trial.steps for trial in best.completed} & {trial.steps for trial in reference.completed}
        missing = [] if known else [reference]
    # The steps that are not measured are longer for the reference than for the trials that give the start-up.
    return sum(expected_gpu_seconds(PlannedTrial(each, steps + EXCLUDED_STEPS), candidates) for each in missing)


def _likely_winner(candidates: Sequence[Candidate], objective: Objective) -> Candidate | None:
    """Return the best candidate so far; before the first trial the best forecast one."""
    if tried := by_score(candidates, objective):
        return tried[0]
    waiting = [each for each in candidates if each.status is Status.WAITING and each.config is not None]
    forecasts = [(each.forecast(objective) or inf, each) for each in waiting]
    return min(forecasts, key=itemgetter(0), default=(inf, None))[1]

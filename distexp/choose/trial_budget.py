"""The budget of a search: the expected cost of trials, and which of them it allows."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from distexp.choose.candidate import Candidate, Status
from distexp.choose.search_result import PlannedTrial, Rung

STARTUP_S = 15.0
"""Assumed start of a trial: libraries, data and model. The first trials measure it."""


def affordable_trials(
    batch: Sequence[PlannedTrial], candidates: Sequence[Candidate], rungs: Sequence[Rung], budget_gpu_s: float
) -> list[PlannedTrial]:
    """Return the first trials of a batch that the budget allows. The first trial of a search is always allowed.

    Args:
        batch: Trials to run, in order.
        candidates: All candidates of the search. The costs of their trials so far give the expected ones.
        rungs: The batches that have ended.
        budget_gpu_s: Most GPU-seconds of all trials together.
    """
    expected_s = sum(rung.gpu_seconds for rung in rungs)
    allowed: list[PlannedTrial] = []
    for planned in batch:
        expected_s += expected_gpu_seconds(planned, candidates)
        is_first_of_search = not allowed and not rungs
        if expected_s > budget_gpu_s and not is_first_of_search:
            break
        allowed.append(planned)
    return allowed


def expected_gpu_seconds(planned: PlannedTrial, candidates: Sequence[Candidate]) -> float:
    """Return the expected GPU-seconds of a trial, with the start-up that follows from the trials so far.

    The step time is that of the candidate's last trial. Without one it is the forecast, scaled by the median of
    measured / forecast step times.
    """
    all_tried = [candidate for candidate in candidates if candidate.status is Status.TRIED]
    done = [(tried, trial) for tried in all_tried for trial in tried.completed if trial.step_s]
    startups = [trial.gpu_seconds / tried.workers - trial.steps * (trial.step_s or 0.0) for tried, trial in done]
    scales = [(trial.step_s or 0.0) / tried.forecast_s for tried, trial in done if tried.forecast_s]
    candidate = planned.candidate
    step_s = (candidate.forecast_s or 0.0) * (median(scales) if scales else 1.0)
    if candidate.completed and candidate.completed[-1].step_s:
        step_s = candidate.completed[-1].step_s
    return candidate.workers * (_startup_s(startups, candidate) + planned.steps * step_s)


def _startup_s(startups: Sequence[float], candidate: Candidate) -> float:
    """Return the expected start-up: the median of the trials so far. Before the first one, it is assumed.

    The longest start-up of local trials does not count: the first trial imports the libraries for all of them.
    """
    usual = sorted(startups) if candidate.queues else sorted(startups)[:-1]
    return median(usual) if usual else min([STARTUP_S, *startups])

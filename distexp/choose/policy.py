"""The policy of a search: which candidate is tried next, what it may cost, and why others are not tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf
from statistics import median

from distexp.choose.candidate import KERNELS, OUT_OF_MEMORY, Candidate, Objective, SearchRules, Status
from distexp.choose.predictions.forecast_scale import (
    best_score,
    fewer_launches_factor,
    forecast_scales,
    scaled_forecast,
    useful_forecasts,
)
from distexp.choose.predictions.pruning import allowed_if_too_close, probably_fits
from distexp.choose.ranking import PlannedTrial, Rung, by_score
from distexp.hardware.facts import gpus_with
from distexp.system.units import MIB_PER_GB

Families = Iterable[Sequence[Candidate]]
"""All candidates, by family and in the order of their micro-batches."""


def representatives(families: Families, objective: Objective, *, only_certain: bool = False) -> list[Candidate]:
    """Return the best forecast member of each family without a score, the best one first.

    One that may not fit, but probably does, is chosen only after the first score, because then its forecast is compared
    with that. The others that may not fit are chosen only if the family has no other member.

    Args:
        families: All candidates, by family.
        objective: The objective of the search.
        only_certain: Whether members that may not fit are left out.
    """
    members_of_families = list(families)
    order = _order([member for members in members_of_families for member in members], objective)
    chosen = []
    for members in members_of_families:
        waiting = [each for each in members if each.status is Status.WAITING and not (only_certain and each.too_close)]
        if waiting and not any(member.status is Status.TRIED for member in members):
            # Of two with the same forecast, the larger micro-batch launches fewer kernels.
            chosen.append(min(reversed(waiting), key=order))
    return sorted(chosen, key=order)


def useful_representatives(families: Families, objective: Objective, rules: SearchRules) -> list[Candidate]:
    """Return a member of each family without a score that may still be the best one, the best forecast first.

    If a member that may not fit is not worth its risk, another member of its family may be worth a trial.
    """
    members_of_families = list(families)
    candidates = [member for members in members_of_families for member in members]
    found = useful_forecasts(representatives(members_of_families, objective), candidates, objective, rules)
    known = {candidate.family for candidate in found}
    certain = representatives(members_of_families, objective, only_certain=True)
    others = [candidate for candidate in certain if candidate.family not in known]
    found += useful_forecasts(others, candidates, objective, rules)
    return sorted(found, key=_order(candidates, objective))


def _order(candidates: Sequence[Candidate], objective: Objective) -> Callable[[Candidate], tuple[bool, bool, float]]:
    """Return the key that is smaller for a candidate to try earlier."""
    scored = best_score(candidates, objective) is not None

    def key(candidate: Candidate) -> tuple[bool, bool, float]:
        forecast = candidate.forecast(objective)
        uncertain = not scored and candidate.too_close
        return uncertain, not probably_fits(candidate, candidates), inf if forecast is None else forecast

    return key


# The neighbors to try: the next smaller and larger micro-batches of the families that were tried.


def neighbors_to_try(
    families: Iterable[Sequence[Candidate]], objective: Objective, rules: SearchRules
) -> list[Candidate]:
    """Return the members next to the best ones of their families that may be the best of all."""
    candidates = [member for members in families for member in members]
    found: list[Candidate] = []
    for known in _best_members(families, objective):
        around = _untried_neighbors(known, [each for each in candidates if each.family == known.family])
        found += [each for each in around if _may_be_best(each, known, candidates, objective, rules)]
        if len({each.family for each in found}) == rules.families:
            break
    return found


def _best_members(families: Iterable[Sequence[Candidate]], objective: Objective) -> list[Candidate]:
    """Return the best member of each family that was tried, the best one of all first."""
    return by_score((member for members in families for member in by_score(members, objective)[:1]), objective)


def _untried_neighbors(known: Candidate, members: Sequence[Candidate]) -> Iterator[Candidate]:
    usable = [candidate for candidate in members if candidate.status in (Status.WAITING, Status.TRIED)]
    position = usable.index(known)
    around = usable[max(0, position - 1) : position + 2]
    yield from (candidate for candidate in around if candidate.status is Status.WAITING)


def _may_be_best(
    candidate: Candidate,
    known: Candidate,
    candidates: Sequence[Candidate],
    objective: Objective,
    rules: SearchRules,
) -> bool:
    """Return whether a member may be the best one of all. One that may not fit must be expected to be better."""
    own = (known.score(objective) or 0.0) / (best_score(candidates, objective) or inf)
    measured = _measured_ratio(candidate, known, candidates, objective)
    forecast, forecast_of_known = candidate.forecast(objective), known.forecast(objective)
    if measured is None and (forecast is None or not forecast_of_known):
        return own <= 1 + rules.near and not candidate.too_close
    fewer_launches = fewer_launches_factor(known, candidate, objective)
    ratio = measured or (forecast or 0.0) / (forecast_of_known or 1.0) * fewer_launches
    if candidate.too_close:
        return ratio * own < allowed_if_too_close(candidate, candidates, rules)
    # A smaller micro-batch launches more kernels and reads the weights more often. It is rarely better than forecast.
    if candidate.micro_batch < known.micro_batch:
        return ratio * own <= 1
    return ratio * own <= 1 + (rules.neighbor_forecast if measured is None else rules.neighbor_certain)


def _measured_ratio(
    candidate: Candidate, known: Candidate, candidates: Sequence[Candidate], objective: Objective
) -> float | None:
    """Return the ratio of the scores of two members of a family, as measured in other families.

    Only families with the same workers and kernels count, because others saturate a GPU at another micro-batch.

    Returns:
        The median over these families; None if no other family has both micro-batches.
    """
    scores: dict[tuple[str, ...], dict[int, float]] = {}
    for other in candidates:
        score = other.score(objective) if other.status is Status.TRIED else None
        if score and other.family != candidate.family and _curve(other) == _curve(candidate):
            scores.setdefault(other.family, {})[other.micro_batch] = score
    sizes = candidate.micro_batch, known.micro_batch
    ratios = [found[sizes[0]] / found[sizes[1]] for found in scores.values() if all(size in found for size in sizes)]
    return median(ratios) if ratios else None


def _curve(candidate: Candidate) -> tuple[int, list[str]]:
    """Return what decides at which micro-batch a GPU is saturated."""
    return candidate.workers, [text for text in candidate.family if text.startswith(f"{KERNELS}=")]


# Trials that a search repeats, because they are far slower than the forecasts let expect.
#
# Other programs can slow down one trial by several times. Without a repeat, the whole family would be left out.


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


# Why the candidates that still wait at the end of a search were not tried.


NOT_TRIED = "not tried"
"""Start of the reason of a candidate that fits, and that the search left out."""

LOOKS_EQUAL = 0.005
"""Ratios that are nearer to 1 look like 1 with two decimals."""

LOOKS_LIKE_ONE = 1.05
"""Smaller ratios look like 1 or less with one decimal."""

NEEDED = {
    Objective.THROUGHPUT: "time",
    Objective.ENERGY: "energy",
    Objective.COST: "price",
    Objective.MEMORY: "memory",
}
"""What an objective minimizes."""


def prune_untried(families: Iterable[Sequence[Candidate]], objective: Objective, *, near: float, stopped: str) -> None:
    """Prune the candidates that still wait, with the reason why they were not tried."""
    members_of_families = list(families)
    candidates = [member for members in members_of_families for member in members]
    best = best_score(candidates, objective)
    for members in members_of_families:
        tried = by_score(members, objective)
        for waiting in (member for member in members if member.status is Status.WAITING):
            reason = ""
            if tried and best:
                ratio = (tried[0].score(objective) or 0.0) / best
                reason = _reason_of_family(tried[0], ratio, NEEDED[objective], near=near, stopped=stopped)
            if not reason:
                expected = scaled_forecast(waiting, candidates, objective)
                ratio_of_forecast = None if best is None or expected is None else expected / best
                reason = _reason_of_forecast(waiting, ratio_of_forecast, NEEDED[objective], stopped)
            waiting.prune(f"{NOT_TRIED}: {reason}")


def _reason_of_family(best_member: Candidate, ratio: float, needed: str, *, near: float, stopped: str) -> str:
    """Return why the other members of a family were not tried; empty if only the early end is the reason."""
    micro_batch = f"micro-batch {best_member.micro_batch} of this family"
    if ratio > 1 + near:
        return f"{micro_batch} needs {ratio:.1f} times the {needed} of the best"
    return "" if stopped else f"{micro_batch} is measured or forecast to be better"


def _reason_of_forecast(candidate: Candidate, ratio: float | None, needed: str, stopped: str) -> str:
    """Return why no member of a family was tried."""
    if stopped or ratio is None:
        return stopped or "the search ended"
    if ratio <= 1 and candidate.too_close:
        return "it probably does not fit"
    if abs(ratio - 1) < LOOKS_EQUAL:
        return f"its forecast needs as much {needed} as the best"
    return f"its forecast is {_format_ratio(ratio)} times the {needed} of the best"


def _format_ratio(ratio: float) -> str:
    """Return a ratio with one decimal, or with two if it would look like 1 or less."""
    return f"{ratio:.1f}" if ratio >= LOOKS_LIKE_ONE else f"{ratio:.2f}"


# Why a search has no winner, with the configuration that needs the least memory.


def describe_no_winner(candidates: Sequence[Candidate]) -> str:
    """Return why no candidate completed, with the configuration that needs the least memory."""
    failed = [candidate for candidate in candidates if candidate.status is Status.FAILED]
    if failed:
        reasons = list(dict.fromkeys(candidate.reason for candidate in failed))
        has_completed = any(candidate.completed for candidate in failed)
        failure = "no candidate has a result" if has_completed else "no trial completed"
        text = f"{failure}: {reasons[0]}"
        ran_out = [
            candidate for candidate in failed if any(trial.status in OUT_OF_MEMORY for trial in candidate.trials)
        ]
        nearest = nearest_candidate(ran_out) if len(ran_out) == len(failed) else None
    else:
        nearest = nearest_candidate(candidates)
        text = "no candidate can be tried" if nearest is None else "no candidate fits into the memory"
    if nearest is None:
        reasons = list(dict.fromkeys(candidate.reason for candidate in candidates if candidate.reason))
        return f"{text}: {reasons[0]}" if reasons and not failed else text
    return f"{text}; the nearest one is {describe_nearest(nearest)}"


def nearest_candidate(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the predicted candidate that needs the least memory; None if none is predicted."""
    known = [
        candidate
        for candidate in candidates
        if candidate.predicted is not None and candidate.predicted.required_mib is not None
    ]
    return min(known, key=_required_mib, default=None)


def _required_mib(candidate: Candidate) -> float:
    assert candidate.predicted is not None, "the caller chose predicted ones"
    return candidate.predicted.required_mib or 0.0


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


# The budget of a search: the expected cost of trials, and which of them it allows.


STARTUP_S = 15.0
"""Assumed start of a trial: libraries, data and model. The first trials measure it."""


def affordable_trials(
    batch: Sequence[PlannedTrial], candidates: Sequence[Candidate], rungs: Sequence[Rung], budget_gpu_s: float
) -> list[PlannedTrial]:
    """Return the first trials of a batch that the budget allows. The first trial of a search is always allowed."""
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

"""The policy of a search: what is tried next, what is repeated, when the search ends, and what a trial may cost.

``search`` asks the questions of this file in turn, after each batch of trials:

- Forecasts: what do the measured scores show about candidates that were not tried?
- Memory: is a candidate tried that may not fit?
- Families: which member of each family is tried first, and which families cannot be the best any more?
- Neighbors: which smaller and larger micro-batches of the best families are tried?
- Doubtful trials: which ones have other programs disturbed?
- Repeats: is the best candidate better than its rivals beyond the noise?
- Budget: which trials can still be paid for?

``SearchRules`` in ``candidate.py`` has the numbers. Nothing here changes a candidate, except ``mark_disturbed``. A
family is a sequence of its members in the order of their micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from math import exp, inf, log, sqrt
from operator import itemgetter
from statistics import fmean, median

from distexp.choose.candidate import (
    CHECKPOINTING,
    KERNELS,
    OOM_GPU,
    OOM_HOST,
    Candidate,
    Objective,
    SearchRules,
    Status,
)
from distexp.choose.ranking import PlannedTrial, by_score, deviation_of_a_step
from distexp.plan.verdict import available_mib
from distexp.statistics.noise import expected_gain

Families = Collection[Sequence[Candidate]]  # all candidates, by family and in the order of their micro-batches

# Forecasts: how the measured scores compare with them.


def best_score(candidates: Iterable[Candidate], objective: Objective) -> float | None:
    """Return the smallest score of the candidates that were tried; None if there is none."""
    scores = (candidate.score(objective) for candidate in candidates if candidate.status is Status.TRIED)
    return min((score for score in scores if score is not None), default=None)


def forecast_scales(
    candidates: Iterable[Candidate], objective: Objective, applied_to: Candidate | None = None
) -> list[float]:
    """Return score / forecast of each candidate that was tried and has both.

    If they are needed for a candidate that was not tried, they are those that ``fewer_launches_factor`` allows for it.
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


def without_checkpointing(candidate: Candidate) -> tuple[str, ...]:
    """Return the family of a candidate, the same with checkpointing and without."""
    return tuple(text for text in candidate.family if not text.startswith(f"{CHECKPOINTING}="))


def _own_scales(candidate: Candidate, candidates: Iterable[Candidate], objective: Objective) -> list[float]:
    """Return the scales of the families that differ only in checkpointing. They have the same error."""
    family = without_checkpointing(candidate)
    return forecast_scales([each for each in candidates if without_checkpointing(each) == family], objective, candidate)


def scaled_forecast(candidate: Candidate, candidates: Sequence[Candidate], objective: Objective) -> float | None:
    """Return the score that is expected of a candidate; None if its forecast or every scale is unknown."""
    forecast = candidate.forecast(objective)
    scales = _own_scales(candidate, candidates, objective) or forecast_scales(candidates, objective, candidate)
    return forecast * median(scales) if forecast is not None and scales else None


def exact_scale(candidates: Iterable[Candidate], objective: Objective) -> float | None:
    """Return score / forecast if the forecasts have no error: the score of a second of step time, on average.

    Candidates that were tried show how the score depends on the step time; None if no step time was measured.
    """
    if objective is Objective.MEMORY:  # Its forecast is in the unit of its score.
        return 1.0
    logarithms = [
        log(score / step_s)
        for candidate in candidates
        if candidate.status is Status.TRIED
        and (score := candidate.score(objective))
        and (step_s := candidate.measured_time(objective))
    ]
    return exp(fmean(logarithms)) if logarithms else None


# Memory: candidates that may not fit.


def probably_fits(candidate: Candidate, candidates: Iterable[Candidate]) -> bool:
    """Return whether a candidate fits if the prediction has no error, or if one that needs as much has completed.

    The memory is that of a GPU, or on CPUs that of a node. One with an unknown memory probably does not fit.
    """
    if not candidate.too_close:
        return True
    needed, memory = candidate.required_mib, available_mib(candidate.predicted) if candidate.predicted else None
    if needed is None or memory is None:
        return False
    for other in candidates:
        required = other.required_mib
        if required is None:
            continue
        # A trial is better evidence than the prediction: one that needs less has run out of this memory.
        ran_out = any(trial.status == (OOM_HOST if other.on_cpus else OOM_GPU) for trial in other.trials)
        if ran_out and required <= needed:
            return False
        if other.completed:
            memory = max(memory, required)
    return needed <= memory


def _allowed_if_too_close(candidate: Candidate, candidates: Iterable[Candidate], rules: SearchRules) -> float:
    """Return the most that the expected score of a candidate that may not fit may be, relative to the best one."""
    # A trial that runs out of memory costs a start-up. So it must promise a clear gain if it probably does not fit.
    return 1.0 if probably_fits(candidate, candidates) else 1 - rules.worthwhile


# Families: the first trial of each, and which ones cannot be the best any more.


def representatives(families: Families, objective: Objective, *, only_certain: bool = False) -> list[Candidate]:
    """Return the best forecast member of each family without a score, the best one first.

    One that may not fit, but probably does, is chosen only after the first score, because then its forecast is compared
    with that. The others that may not fit are chosen only if the family has no other member. On request, members that
    may not fit are left out.
    """
    order = _order([member for members in families for member in members], objective)
    chosen = []
    for members in families:
        waiting = [each for each in members if each.status is Status.WAITING and not (only_certain and each.too_close)]
        if waiting and not any(member.status is Status.TRIED for member in members):
            # Of two with the same forecast, the larger micro-batch launches fewer kernels.
            chosen.append(min(reversed(waiting), key=order))
    return sorted(chosen, key=order)


def useful_representatives(families: Families, objective: Objective, rules: SearchRules) -> list[Candidate]:
    """Return a member of each family without a score that may still be the best one, the best forecast first."""
    candidates = [member for members in families for member in members]
    found = useful_forecasts(representatives(families, objective), candidates, objective, rules)
    # If a member that may not fit is not worth its risk, another member of its family may be worth a trial.
    known = {candidate.family for candidate in found}
    certain = representatives(families, objective, only_certain=True)
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


def useful_forecasts(
    waiting: Sequence[Candidate], candidates: Sequence[Candidate], objective: Objective, rules: SearchRules
) -> list[Candidate]:
    """Return those of the waiting candidates that may still be the best, by the errors of the forecasts so far."""
    best = best_score(candidates, objective)
    if best is None:
        return list(waiting)
    return [each for each in waiting if _family_may_win(each, candidates, best, objective, rules)]


def _family_may_win(
    candidate: Candidate, candidates: Sequence[Candidate], best: float, objective: Objective, rules: SearchRules
) -> bool:
    # By the scales of all families: the search ends if no trial is expected to gain enough for its cost.
    forecast, scales = candidate.forecast(objective), forecast_scales(candidates, objective, candidate)
    if forecast and scales:
        gain = expected_gain(forecast, best, scales, exact_scale(candidates, objective), rules)
        if gain < least_gain(candidates, rules):
            return False
    # By the scales of the families that differ only in checkpointing: their errors are the same, so few are possible.
    expected = scaled_forecast(candidate, candidates, objective)
    if expected is None or not (candidate.too_close or _own_scales(candidate, candidates, objective)):
        return True
    allowed = _allowed_if_too_close(candidate, candidates, rules) if candidate.too_close else 1 + rules.same_kernels
    return expected < best * allowed


def least_gain(candidates: Iterable[Candidate], rules: SearchRules) -> float:
    """Return the expected improvement for which a trial is worth its cost, relative to the best score.

    It is the smaller one of ``least_gain`` and of ``gain_of_sweep`` divided by the number of candidates that may be
    tried: in a large space a trial costs a smaller part of the sweep.
    """
    fitting = sum(candidate.status is not Status.PRUNED for candidate in candidates)
    return min(rules.least_gain, rules.gain_of_sweep / max(1, fitting))


# Neighbors: the next smaller and larger micro-batches of the families that were tried.


def neighbors_to_try(families: Families, objective: Objective, rules: SearchRules) -> list[Candidate]:
    """Return the members next to the best ones of their families that may be the best of all."""
    candidates = [member for members in families for member in members]
    best_members = by_score((member for members in families for member in by_score(members, objective)[:1]), objective)
    found: list[Candidate] = []
    for known in best_members:
        family = [each for each in candidates if each.family == known.family]
        usable = [each for each in family if each.status in (Status.WAITING, Status.TRIED)]
        position = usable.index(known)
        around = [each for each in usable[max(0, position - 1) : position + 2] if each.status is Status.WAITING]
        found += [each for each in around if _neighbor_may_win(each, known, candidates, objective, rules)]
        if len({each.family for each in found}) == rules.families:
            break
    return found


def _neighbor_may_win(
    candidate: Candidate, known: Candidate, candidates: Sequence[Candidate], objective: Objective, rules: SearchRules
) -> bool:
    """Return whether a neighbor of the best member of a family may be the best of all."""
    own = (known.score(objective) or 0.0) / (best_score(candidates, objective) or inf)
    measured = _measured_ratio(candidate, known, candidates, objective)
    forecast, forecast_of_known = candidate.forecast(objective), known.forecast(objective)
    if measured is None and (forecast is None or not forecast_of_known):
        return own <= 1 + rules.near and not candidate.too_close
    # What other families have measured is better evidence than the forecasts.
    fewer_launches = fewer_launches_factor(known, candidate, objective)
    ratio = measured or (forecast or 0.0) / (forecast_of_known or 1.0) * fewer_launches
    if candidate.too_close:
        return ratio * own < _allowed_if_too_close(candidate, candidates, rules)
    # A smaller micro-batch launches more kernels and reads the weights more often. It is rarely better than forecast.
    if candidate.micro_batch < known.micro_batch:
        return ratio * own <= 1
    return ratio * own <= 1 + (rules.neighbor_forecast if measured is None else rules.neighbor_certain)


def _measured_ratio(
    candidate: Candidate, known: Candidate, candidates: Sequence[Candidate], objective: Objective
) -> float | None:
    """Return the ratio of the scores of two members of a family: the median over other families that have both.

    Only families with the same workers and kernels count, because others saturate a GPU at another micro-batch.
    """
    scores: dict[tuple[str, ...], dict[int, float]] = {}
    for other in candidates:
        score = other.score(objective) if other.status is Status.TRIED else None
        if score and other.family != candidate.family and _saturation(other) == _saturation(candidate):
            scores.setdefault(other.family, {})[other.micro_batch] = score
    sizes = candidate.micro_batch, known.micro_batch
    ratios = [found[sizes[0]] / found[sizes[1]] for found in scores.values() if all(size in found for size in sizes)]
    return median(ratios) if ratios else None


def _saturation(candidate: Candidate) -> tuple[int, list[str]]:
    """Return what decides at which micro-batch a GPU is saturated."""
    return candidate.workers, [text for text in candidate.family if text.startswith(f"{KERNELS}=")]


# Doubtful trials: those that are far slower than the forecasts let expect.
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


# Repeats: the best candidate, and the rival that may be better within the noise.


def candidates_to_repeat(candidates: Sequence[Candidate], objective: Objective, rules: SearchRules) -> list[Candidate]:
    """Return the best candidate and its strongest rival, or the one of both with fewer steps; none if all is certain.

    The best one is repeated in any case, because the best of many short trials was often only lucky. It is repeated
    first, because its repeat may show that no rival needs one.
    """
    tried = by_score(candidates, objective)
    if not tried:
        return []
    best, others = tried[0], tried[1:]
    if len(best.completed) < 2:
        return [best]
    # A rival's possible gain is that at the end of the 95 % confidence interval. The noise is that of the logarithm. So
    # on a busy machine the worst candidates are not the strongest rivals.
    noise, score = deviation_of_a_step(candidates, objective, rules).noise_of_mean(1), best.score(objective) or 1.0
    gain, rival = 0.0, best
    for other in others:
        noise_of_ratio = noise * sqrt(1 / best.measured_steps + 1 / other.measured_steps)
        possible = 1 - (other.score(objective) or inf) / score * exp(-noise_of_ratio)
        gain, rival = max((gain, rival), (possible, other), key=itemgetter(0))
    if gain <= rules.negligible:
        return []
    return [each for each in (best, rival) if each.measured_steps == min(best.measured_steps, rival.measured_steps)]


# Budget: the expected cost of trials, and which of them it allows.


STARTUP_S = 15.0  # Assumed start of a trial: libraries, data and model. The first trials measure it.


def affordable_trials(
    batch: Sequence[PlannedTrial], candidates: Sequence[Candidate], spent_gpu_s: float, budget_gpu_s: float
) -> list[PlannedTrial]:
    """Return the first trials of a batch with which the whole search stays within its budget."""
    allowed: list[PlannedTrial] = []
    for planned in batch:
        spent_gpu_s += expected_gpu_seconds(planned, candidates)
        if spent_gpu_s > budget_gpu_s:
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
    scales = [(trial.step_s or 0.0) / tried.forecast_s for tried, trial in done if tried.forecast_s]
    candidate = planned.candidate
    step_s = (candidate.forecast_s or 0.0) * (median(scales) if scales else 1.0)
    if candidate.completed and candidate.completed[-1].step_s:
        step_s = candidate.completed[-1].step_s
    startups = sorted(trial.gpu_seconds / tried.workers - trial.steps * (trial.step_s or 0.0) for tried, trial in done)
    # The longest start-up of local trials does not count: the first trial imports the libraries for all of them.
    usual = startups if candidate.queues else startups[:-1]
    startup_s = median(usual) if usual else min([STARTUP_S, *startups])
    return candidate.workers * (startup_s + planned.steps * step_s)

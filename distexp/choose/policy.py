"""The policy of a search: what is tried next, what is repeated, when the search ends, and what a trial may cost."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import exp, inf, log, sqrt
from operator import itemgetter
from statistics import fmean, median

from distexp.choose.candidate import (
    CHECKPOINTING,
    FAILED_ELSEWHERE,
    KERNELS,
    MICRO_BATCH,
    Candidate,
    Objective,
    SearchRules,
    Status,
    families_of,
    override_pairs,
)
from distexp.choose.ranking import PlannedTrial, by_score, deviation_of_a_step
from distexp.plan.verdict import available_mib
from distexp.statistics.noise import expected_gain

STARTUP_S = 15.0  # Assumed start of a trial: libraries, data and model. The first trials measure it.


class Policy:
    """Decisions of a search, by the trials of its candidates so far.

    Nothing here changes a candidate, except ``mark_disturbed``. A family has its members in the order of their
    micro-batches. ``rules`` are the numbers behind the decisions.
    """

    def __init__(self, candidates: Iterable[Candidate], objective: Objective, rules: SearchRules) -> None:
        self.objective, self.rules = objective, rules
        self.families = families_of(candidates)
        self.candidates = [member for members in self.families.values() for member in members]

    @property
    def best_score(self) -> float | None:
        """Return the smallest score of the candidates that were tried; None if there is none."""
        tried = by_score(self.candidates, self.objective)
        return tried[0].score(self.objective) if tried else None

    # Forecasts: what the measured scores show about candidates that were not tried.

    def _scales(self, candidates: Iterable[Candidate], applied_to: Candidate | None = None) -> list[float]:
        """Return score / forecast of the tried candidates, or what ``_fewer_launches_factor`` leaves for another."""
        tried = [candidate for candidate in candidates if candidate.is_tried]
        known = [(each, each.score(self.objective), each.forecast(self.objective)) for each in tried]
        return [
            score / forecast * (1.0 if applied_to is None else self._fewer_launches_factor(each, applied_to))
            for each, score, forecast in known
            if score and forecast
        ]

    def _fewer_launches_factor(self, known: Candidate, other: Candidate) -> float:
        """Return by which factor the scale of a measured candidate may be smaller for a larger micro-batch; at most 1.

        A small micro-batch may be slower than its forecast because the CPU launches its kernels too slowly. Such time
        is in proportion to the number of micro-batches. So as much of the time above the forecast as possible is taken
        for it.
        """
        measured, forecast = known.step_s, known.forecast_s
        is_larger = other.micro_batch > known.micro_batch and self.objective is not Objective.MEMORY
        if not is_larger or not measured or not forecast or measured <= forecast:
            return 1.0
        return (forecast + (measured - forecast) * known.micro_batch / other.micro_batch) / measured

    def _own_scales(self, candidate: Candidate) -> list[float]:
        """Return the scales of the families that differ only in checkpointing. They have the same error."""
        family = without_checkpointing(candidate)
        return self._scales([each for each in self.candidates if without_checkpointing(each) == family], candidate)

    def scaled_forecast(self, candidate: Candidate) -> float | None:
        """Return the score that is expected of a candidate; None if its forecast or every scale is unknown."""
        forecast = candidate.forecast(self.objective)
        scales = self._own_scales(candidate) or self._scales(self.candidates, candidate)
        return forecast * median(scales) if forecast is not None and scales else None

    def exact_scale(self) -> float | None:
        """Return the mean score of a second of step time: score / forecast if the forecasts have no error; or None."""
        if self.objective is Objective.MEMORY:  # Its forecast is in the unit of its score.
            return 1.0
        logarithms = [
            log(score / step_s)
            for candidate in self.candidates
            if candidate.is_tried
            and (score := candidate.score(self.objective))
            and (step_s := candidate.measured_time(self.objective))
        ]
        return exp(fmean(logarithms)) if logarithms else None

    def _allowed_if_too_close(self, candidate: Candidate) -> float:
        """Return the most that the expected score of a candidate that may not fit may be, relative to the best one."""
        # A trial that runs out of memory costs a start-up. So it must promise a clear gain if it probably does not fit.
        return 1.0 if probably_fits(candidate, self.candidates) else 1 - self.rules.worthwhile

    # Families: which member of each is tried first, and which ones cannot be the best any more.

    def representatives(self, *, only_certain: bool = False) -> list[Candidate]:
        """Return the best forecast member of each family without a score, the best one first.

        One that may not fit, but probably does, is chosen only after the first score, because then its forecast is
        compared with that. The others that may not fit are chosen only if the family has no other member. On request,
        members that may not fit are left out.
        """
        chosen = []
        for members in self.families.values():
            waiting = [each for each in members if each.is_waiting and not (only_certain and each.too_close)]
            if waiting and not any(member.is_tried for member in members):
                # Of two with the same forecast, the larger micro-batch launches fewer kernels.
                chosen.append(self._in_order(reversed(waiting))[0])
        return self._in_order(chosen)

    def useful_representatives(self) -> list[Candidate]:
        """Return a member of each family without a score that may still be the best one, the best forecast first."""
        found = self._that_may_win(self.representatives())
        # If a member that may not fit is not worth its risk, another member of its family may be worth a trial.
        known = {candidate.family for candidate in found}
        certain = self.representatives(only_certain=True)
        return self._in_order(found + self._that_may_win([each for each in certain if each.family not in known]))

    def _in_order(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Return candidates that were not tried, those to try earlier first."""
        scored = self.best_score is not None

        def key(candidate: Candidate) -> tuple[bool, bool, float, bool, bool]:
            forecast = candidate.forecast(self.objective)
            uncertain = not scored and candidate.too_close
            time = inf if forecast is None else forecast
            # Without a forecast, what is slower by design is tried later.
            slow = (candidate.offloads, candidate.checkpoints) if forecast is None else (False, False)
            return uncertain, not probably_fits(candidate, self.candidates), time, *slow

        return sorted(candidates, key=key)

    def _that_may_win(self, waiting: Sequence[Candidate]) -> list[Candidate]:
        """Return those of the waiting candidates that may still be the best, by the errors of the forecasts so far."""
        best = self.best_score
        return [each for each in waiting if best is None or self._family_may_win(each, best)]

    def _family_may_win(self, candidate: Candidate, best: float) -> bool:
        # By the scales of all families: the search ends if no trial is expected to gain enough for its cost.
        forecast, scales = candidate.forecast(self.objective), self._scales(self.candidates, candidate)
        if forecast and scales:
            gain = expected_gain(forecast, best, scales, self.exact_scale(), self.rules)
            if gain < self.least_gain():
                return False
        # By those of the families that differ only in checkpointing: their errors are the same, so few are possible.
        expected = self.scaled_forecast(candidate)
        if expected is None or not (candidate.too_close or self._own_scales(candidate)):
            return True
        pair = 1 + self.rules.checkpointing_pair
        return expected < best * (self._allowed_if_too_close(candidate) if candidate.too_close else pair)

    def least_gain(self) -> float:
        """Return the expected improvement for which a trial is worth its cost: smaller in a large space."""
        # A failure elsewhere does not make an exhaustive sweep smaller: it would try these candidates too.
        fitting = sum(each.status is not Status.PRUNED or FAILED_ELSEWHERE in each.reason for each in self.candidates)
        return min(self.rules.least_gain, self.rules.gain_of_sweep / max(1, fitting))

    # Neighbors: the next smaller and larger micro-batches of the families that were tried.

    def neighbors_to_try(self) -> list[Candidate]:
        """Return the members next to the best ones of their families that may be the best of all."""
        best_members = (each for members in self.families.values() for each in by_score(members, self.objective)[:1])
        found: list[Candidate] = []
        for known in by_score(best_members, self.objective):
            usable = [each for each in self.families[known.family] if each.is_waiting or each.is_tried]
            position = usable.index(known)
            around = [each for each in usable[max(0, position - 1) : position + 2] if each.is_waiting]
            found += [each for each in around if self._neighbor_may_win(each, known)]
            if len({each.family for each in found}) == self.rules.families:
                break
        return found

    def _neighbor_may_win(self, candidate: Candidate, known: Candidate) -> bool:
        """Return whether a neighbor of the best member of a family may be the best of all."""
        best = self.best_score
        assert best is not None, "the known one has a score"
        own = known.known_score(self.objective) / best
        # What other families have measured is better evidence than the forecasts.
        ratio, allowed = self._measured_ratio(candidate, known), 1 + self.rules.neighbor_certain
        if ratio is None:
            forecast, forecast_of_known = candidate.forecast(self.objective), known.forecast(self.objective)
            if forecast is None or not forecast_of_known:
                return own <= 1 + self.rules.near and not candidate.too_close
            ratio = forecast / forecast_of_known * self._fewer_launches_factor(known, candidate)
            allowed = 1 + self.rules.neighbor_forecast
        if candidate.too_close:
            return ratio * own < self._allowed_if_too_close(candidate)
        # A smaller micro-batch launches more kernels and reads the weights more often. It is rarely better than
        # forecast.
        return ratio * own <= (1 if candidate.micro_batch < known.micro_batch else allowed)

    def _measured_ratio(self, candidate: Candidate, known: Candidate) -> float | None:
        """Return the ratio of the scores of two members of a family: the median over other families that have both.

        Only families with the same workers and kernels count, because others saturate a GPU at another micro-batch.
        """
        scores: dict[tuple[str, ...], dict[int, float]] = {}
        for other in by_score(self.candidates, self.objective):
            if other.family != candidate.family and _saturation(other) == _saturation(candidate):
                scores.setdefault(other.family, {})[other.micro_batch] = other.known_score(self.objective)
        own, base = candidate.micro_batch, known.micro_batch
        ratios = [found[own] / found[base] for found in scores.values() if own in found and base in found]
        return median(ratios) if ratios else None

    # Trials that are far slower than the forecasts let expect. Other programs can slow down one trial by several times.
    # Without a repeat, the whole family would be left out.

    def doubtful_candidates(self) -> Iterator[Candidate]:
        """Yield the candidates with a single trial that contradicts a forecast with which they may be the best."""
        tried, best = by_score(self.candidates, self.objective), self.best_score
        for candidate in tried:
            scales = self._scales(other for other in tried if other is not candidate)
            forecast, score = candidate.forecast(self.objective), candidate.score(self.objective)
            if len(candidate.trials) != 1 or not (scales and forecast and score and best):
                continue
            expected = forecast * median(scales)
            if score >= self.rules.contradiction * expected and expected <= best * (1 + self.rules.near):
                yield candidate

    def mark_disturbed(self, candidate: Candidate) -> None:
        """Mark the first trial of a candidate as disturbed if its repeat is far better. Then it does not count."""
        if len(candidate.completed) != 2:
            return
        first, second = (trial.score(self.objective) for trial in candidate.completed)
        if first and second and first >= self.rules.disturbed * second:
            candidate.trials = (replace(candidate.trials[0], disturbed=True), *candidate.trials[1:])

    def candidates_to_repeat(self) -> list[Candidate]:
        """Return the best candidate and its strongest rival, or the one of both with fewer steps; none if it is clear.

        The best one is repeated in any case, because the best of many short trials was often only lucky. It is repeated
        first, because its repeat may show that no rival needs one.
        """
        tried = by_score(self.candidates, self.objective)
        if not tried:
            return []
        best, others = tried[0], tried[1:]
        if len(best.completed) < 2:
            return [best]
        # A rival's possible gain is that at the end of the 95 % confidence interval. The noise is that of the
        # logarithm. So on a busy machine the worst candidates are not the strongest rivals.
        noise = deviation_of_a_step(self.candidates, self.objective, self.rules).noise_of_mean(1)
        score, gain, rival = best.known_score(self.objective), 0.0, best
        for other in others:
            noise_of_ratio = noise * sqrt(1 / best.measured_steps + 1 / other.measured_steps)
            possible = 1 - other.known_score(self.objective) / score * exp(-noise_of_ratio)
            gain, rival = max((gain, rival), (possible, other), key=itemgetter(0))
        if gain <= self.rules.negligible:
            return []
        fewest = min(best.measured_steps, rival.measured_steps)
        return [each for each in (best, rival) if each.measured_steps == fewest]


def without_checkpointing(candidate: Candidate) -> tuple[str, ...]:
    """Return the family of a candidate, the same with checkpointing and without."""
    return tuple(text for text in candidate.family if not text.startswith(f"{CHECKPOINTING}="))


def _saturation(candidate: Candidate) -> tuple[int, list[str]]:
    """Return what decides at which micro-batch a GPU is saturated."""
    return candidate.workers, [text for text in candidate.family if text.startswith(f"{KERNELS}=")]


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
        if other.ran_out_of_predicted_memory and required <= needed:
            return False
        if other.completed:
            memory = max(memory, required)
    return needed <= memory


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
    measured / forecast step times. Steps of an unknown time count as 0.
    """
    tried = [candidate for candidate in candidates if candidate.is_tried]
    done = [(each, trial, trial.step_s) for each in tried for trial in each.completed if trial.step_s]
    scales = [step_s / each.forecast_s for each, _, step_s in done if each.forecast_s]
    candidate = planned.candidate
    step_s = candidate.completed[-1].step_s if candidate.completed else None
    if not step_s:
        step_s = (candidate.forecast_s or 0.0) * (median(scales) if scales else 1.0)
    startups = sorted(trial.gpu_seconds / each.workers - trial.steps * seconds for each, trial, seconds in done)
    # The longest start-up of local trials does not count: the first trial imports the libraries for all of them.
    usual = startups if candidate.queues else startups[:-1]
    startup_s = median(usual) if usual else min([STARTUP_S, *startups])
    return candidate.workers * (startup_s + planned.steps * step_s)


def prune_by_cause(candidates: Sequence[Candidate]) -> None:
    """Prune the candidates that wait, and that have the setting because of which others failed.

    An error that names settings of its candidate is due to these. If several candidates failed for one cause, it is due
    to what they have in common, and what no candidate has that completed.
    """
    failed = [each for each in candidates if each.trials and each.trials[-1].status in ("failed", "invalid")]
    harmless = {pair for each in candidates if each.completed for pair in override_pairs(each)}
    by_cause: dict[str, list[Candidate]] = {}
    for candidate in failed:
        by_cause.setdefault(_cause_of(candidate), []).append(candidate)
    for cause, alike in by_cause.items():
        common = set.intersection(*(set(override_pairs(each)) for each in alike)) - harmless
        common = {(key, value) for key, value in common if key != MICRO_BATCH}
        settings = [_named_in(cause, each) for each in alike] + ([common] if len(alike) > 1 else [])
        for waiting in (each for each in candidates if each.is_waiting):
            if hit := next((each for each in settings if each and each <= set(override_pairs(waiting))), None):
                named = " ".join(f"{key}={value}" for key, value in sorted(hit))
                waiting.prune(f"{named} {FAILED_ELSEWHERE}: {alike[0].trials[-1].error}")


VARYING = re.compile(r"0x[0-9a-f]+|/\S+|(?<![\w=.])\d+(?:[.,]\d+)*")  # addresses, paths, and no values of keys


def _cause_of(candidate: Candidate) -> str:
    """Return the error of a candidate, without its hint, and without what differs between equal errors."""
    return VARYING.sub("N", candidate.trials[-1].error.partition(". ")[0])


def _named_in(cause: str, candidate: Candidate) -> set[tuple[str, str]]:
    """Return the settings of a candidate that an error names."""
    named = ((key, value, re.escape(f"{key}={value}")) for key, value in override_pairs(candidate))
    return {(key, value) for key, value, text in named if re.search(rf"(?<![\w.]){text}(?![\w.])", cause)}

"""Successive halving: which candidates to try, with how many steps, and when to stop.

1. *families*: the best forecast micro-batch of each family, in the order of the forecasts. After each few families the
   forecasts are scaled to the measured scores. Families that cannot reach the best one any more are not tried.
2. *neighbors*: the next smaller and larger micro-batches of the best families, until none is better.
3. *finalists*: the best candidates, again with more steps, half as many after each rung. The order alternates, so that
   a machine that gets slower is no advantage for those that are first.

A search is deterministic: with the same trials it makes the same decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, inf, log, sqrt
from statistics import fmean, median

from distexp.choose.axes import STAGE
from distexp.choose.candidate import (
    COMPLETED,
    OUT_OF_MEMORY,
    Candidate,
    Objective,
    Rung,
    SearchResult,
    Status,
    Trial,
    TryAll,
)
from distexp.choose.result import make_result, ranked

UNMEASURED = {
    Objective.THROUGHPUT: "the run measured no throughput",
    Objective.ENERGY: "the run measured no energy: use choose.objective=throughput",
    Objective.COST: "the run has no price: set cluster.price_per_gpu_hour",
    Objective.MEMORY: "the run measured no memory",
}


@dataclass(frozen=True)
class Rules:
    """Numbers that decide how thorough a search is.

    Attributes:
        steps: Measured steps of a first trial.
        growth: Factor of the steps from one rung of finalists to the next.
        wave: Families that are tried before the forecasts are scaled again.
        families: Families whose neighbors are tried.
        near: Most that a family's score may exceed the best one if its neighbors are tried, relative to it.
        neighbor_rounds: Most rounds of neighbors.
        finalists: Candidates that are tried again.
        close: Most that the score of a finalist may exceed the best one, relative to it. The second is always one.
        doubt: How much better than its scaled forecast a family may be, in standard deviations of the forecasts' error.
        least_error: Smallest error of the forecasts that is assumed, as a standard deviation of their logarithm.
    """

    steps: int = 5
    growth: int = 2
    wave: int = 4
    families: int = 4
    near: float = 0.25
    neighbor_rounds: int = 4
    finalists: int = 4
    close: float = 0.1
    doubt: float = 2.0
    least_error: float = 0.45


DEFAULT_RULES = Rules()
FINALISTS = "finalists"


def search(
    candidates: Sequence[Candidate],
    try_all: TryAll,
    objective: Objective,
    budget_gpu_s: float = inf,
    rules: Rules = DEFAULT_RULES,
) -> SearchResult:
    """Try candidates until the best one is known, or the budget is used up.

    Status, reason and trials of the candidates are changed in place. A trial that fails does not end the search.

    Args:
        candidates: All candidates. Those that wait may be tried.
        try_all: Runs a batch of trials.
        objective: What the best candidate has least of.
        budget_gpu_s: Most GPU seconds of all trials together. At least one trial is run.
        rules: How thorough the search is.
    """
    state = _Search(candidates, try_all, objective, budget_gpu_s, rules)
    state.try_families()
    state.try_neighbors()
    state.try_finalists()
    state.prune_untried()
    return make_result(candidates, objective, state.rungs, state.stopped)


def first_trials(
    candidates: Sequence[Candidate], objective: Objective, rules: Rules = DEFAULT_RULES
) -> list[tuple[Candidate, int]]:
    """Return one member of each family with its steps, in the order in which a search would try them."""
    state = _Search(candidates, lambda batch: [], objective, inf, rules)
    return [(each, rules.steps) for each in state.representatives()]


@dataclass
class _Search:
    candidates: Sequence[Candidate]
    try_all: TryAll
    objective: Objective
    budget: float
    rules: Rules
    rungs: list[Rung] = field(default_factory=list)
    stopped: str = ""

    def __post_init__(self) -> None:
        self.families: dict[tuple[str, ...], list[Candidate]] = {}
        for each in self.candidates:
            self.families.setdefault(each.family, []).append(each)
        for members in self.families.values():
            members.sort(key=lambda each: each.micro_batch)

    # Families

    def try_families(self) -> None:
        """Try one member of each family that may be the best."""
        while not self.stopped:
            limit = self._forecast_limit()
            batch = [each for each in self.representatives() if (each.forecast(self.objective) or 0.0) < limit]
            batch = batch[: self.rules.wave]
            if not batch:
                return
            self._run("families", [(each, self.rules.steps) for each in batch])

    def representatives(self) -> list[Candidate]:
        """Return the best forecast member of each family without a score, the best one first."""
        chosen = [self._representative(members) for members in self.families.values()]
        return sorted((each for each in chosen if each is not None), key=self._order)

    def _representative(self, members: Sequence[Candidate]) -> Candidate | None:
        if any(each.status is Status.TRIED for each in members):
            return None
        waiting = [each for each in members if each.status is Status.WAITING]
        # The larger of two with the same forecast.
        return min(waiting, key=lambda each: (*self._order(each), -each.micro_batch), default=None)

    def _order(self, candidate: Candidate) -> tuple[bool, float]:
        forecast = candidate.forecast(self.objective)
        return candidate.too_close, inf if forecast is None else forecast

    def _forecast_limit(self) -> float:
        """Return the forecast from which a candidate cannot be the best, by the errors of the forecasts so far."""
        best, scales = self._best_score(), self._scales()
        if best is None or not scales:
            return inf
        logarithms = [log(scale) for scale in scales]
        center = fmean(logarithms)
        deviation = sqrt(fmean((each - center) ** 2 for each in logarithms))
        return best / exp(center - self.rules.doubt * max(self.rules.least_error, deviation))

    def _scales(self) -> list[float]:
        """Return score / forecast of each tried candidate."""
        pairs = [(each.score(self.objective), each.forecast(self.objective)) for each in self._tried()]
        return [score / forecast for score, forecast in pairs if score and forecast]

    # Neighbors

    def try_neighbors(self) -> None:
        """Try smaller and larger micro-batches of the best families."""
        for _ in range(self.rules.neighbor_rounds):
            batch = [each for members in self._best_families() for each in self._neighbors(members)]
            if not batch or self.stopped:
                return
            self._run("neighbors", [(each, self.rules.steps) for each in batch])

    def _best_families(self) -> list[list[Candidate]]:
        best = ranked(self.candidates, self.objective)
        limit = (self._best_score() or 0.0) * (1 + self.rules.near)
        near = [each for each in best if (each.score(self.objective) or inf) <= limit]
        names = list(dict.fromkeys(each.family for each in near))
        return [self.families[name] for name in names[: self.rules.families]]

    def _neighbors(self, members: Sequence[Candidate]) -> list[Candidate]:
        """Return the members next to the best one of a family that are not tried yet."""
        best = ranked(members, self.objective)[0]
        usable = [each for each in members if each.status in (Status.WAITING, Status.TRIED)]
        position = usable.index(best)
        around = usable[max(0, position - 1) : position + 2]
        return [each for each in around if each.status is Status.WAITING and self._may_improve(each, best)]

    def _may_improve(self, candidate: Candidate, best: Candidate) -> bool:
        """Return whether a member may be the best, by the forecasts of both. One that is too close must be better."""
        forecast, known = candidate.forecast(self.objective), best.forecast(self.objective)
        if forecast is None or not known:
            return not candidate.too_close
        if candidate.too_close:
            return forecast < known
        score = best.score(self.objective) or inf
        return forecast / known * score <= (self._best_score() or inf) * (1 + self.rules.near)

    # Finalists

    def try_finalists(self) -> None:
        """Try the best candidates again, until two are left. The peak of the memory has no noise."""
        if self.objective is Objective.MEMORY:
            return
        count, steps, forward = self.rules.finalists, self.rules.steps, True
        while not self.stopped:
            finalists = self._finalists(count)
            if len(finalists) < 2:
                return
            steps *= self.rules.growth
            rounds = 1 if len(finalists) > 2 else 2
            for _ in range(rounds):
                order = finalists if forward else finalists[::-1]
                self._run(FINALISTS, [(each, steps) for each in order if each.status is Status.TRIED])
                forward = not forward
            if len(finalists) == 2:
                return
            count = max(2, len(finalists) // 2)

    def _finalists(self, count: int) -> list[Candidate]:
        best = ranked(self.candidates, self.objective)
        limit = (self._best_score() or 0.0) * (1 + self.rules.close)
        near = [each for each in best if (each.score(self.objective) or inf) <= limit]
        return best[: min(count, max(2, len(near)))]

    # Trials

    def _run(self, name: str, batch: Sequence[tuple[Candidate, int]]) -> None:
        """Run a batch of trials, as far as the budget allows."""
        affordable = self._affordable(batch)
        if not affordable:
            return
        if name != FINALISTS:  # Their order alternates. The others run so that few of them need another start-up.
            affordable.sort(key=lambda pair: _shared_start(pair[0]))
        trials = self.try_all(affordable)
        for (candidate, _), trial in zip(affordable, trials, strict=True):
            self._add(candidate, trial)
        self.rungs.append(Rung(name, tuple(affordable), sum(trial.gpu_seconds for trial in trials)))

    def _affordable(self, batch: Sequence[tuple[Candidate, int]]) -> list[tuple[Candidate, int]]:
        """Return the first trials of a batch that the budget allows. Set why the search stops if these are not all."""
        spent = sum(rung.gpu_seconds for rung in self.rungs)
        found: list[tuple[Candidate, int]] = []
        for candidate, steps in batch:
            spent += self._expected_cost(candidate, steps)
            if spent > self.budget and (found or self.rungs):
                self.stopped = f"the budget of {self.budget:.0f} GPU seconds is used up"
                break
            found.append((candidate, steps))
        return found

    def _expected_cost(self, candidate: Candidate, steps: int) -> float:
        """Return the expected GPU seconds of a trial, with the median start of the trials so far."""
        done = [(each, trial) for each in self._tried() for trial in each.completed if trial.step_s]
        starts = [trial.gpu_seconds / each.workers - trial.steps * (trial.step_s or 0.0) for each, trial in done]
        scales = [(trial.step_s or 0.0) / each.forecast_s for each, trial in done if each.forecast_s]
        step_s = (candidate.forecast_s or 0.0) * (median(scales) if scales else 1.0)
        if candidate.completed and candidate.completed[-1].step_s:
            step_s = candidate.completed[-1].step_s
        return candidate.workers * ((median(starts) if starts else 0.0) + steps * step_s)

    def _add(self, candidate: Candidate, trial: Trial) -> None:
        """Add a trial to its candidate. If it failed, prune what would fail too."""
        candidate.trials = (*candidate.trials, trial)
        if trial.status == COMPLETED and trial.score(self.objective) is not None:
            candidate.status = Status.TRIED
            return
        candidate.status = Status.FAILED
        if trial.status == COMPLETED:
            candidate.reason = UNMEASURED[self.objective]
            return
        ran_out = trial.status in OUT_OF_MEMORY
        candidate.reason = trial.error or ("it ran out of memory" if ran_out else f"the run is {trial.status}")
        members = self.families[candidate.family]
        for each in members if ran_out else ():
            if each.status is Status.WAITING and each.micro_batch > candidate.micro_batch:
                size = candidate.micro_batch
                each.prune(f"micro-batch {each.micro_batch} needs more than {size}, which ran out of memory")
        failed = [each for each in members if each.status is Status.FAILED and not _ran_out(each)]
        for each in members if len(failed) > 1 else ():
            if each.status is Status.WAITING:
                each.prune(f"{len(failed)} trials of this family failed: {candidate.reason}")

    def _tried(self) -> list[Candidate]:
        return [each for each in self.candidates if each.status is Status.TRIED]

    def _best_score(self) -> float | None:
        scores = (each.score(self.objective) for each in self._tried())
        return min((score for score in scores if score is not None), default=None)

    # End

    def prune_untried(self) -> None:
        """Prune the candidates that still wait, with the reason why they were not tried."""
        best, scales = self._best_score(), self._scales()
        scale = median(scales) if scales else 1.0
        for members in self.families.values():
            waiting = [each for each in members if each.status is Status.WAITING]
            tried = ranked(members, self.objective)
            for each in waiting:
                reason = self._reason_of_family(tried[0], best) if tried and best else ""
                each.prune(f"not tried: {reason or self._reason_of_forecast(each, best, scale)}")

    def _reason_of_family(self, first: Candidate, best: float) -> str:
        """Return why the other members of a family were not tried; empty if the budget is the reason."""
        ratio = (first.score(self.objective) or 0.0) / best
        if ratio > 1 + self.rules.near:
            return f"micro-batch {first.micro_batch} of this family scored {ratio:.1f} times the best"
        return "" if self.stopped else f"micro-batch {first.micro_batch} is measured or forecast to be better"

    def _reason_of_forecast(self, candidate: Candidate, best: float | None, scale: float) -> str:
        forecast = candidate.forecast(self.objective)
        if self.stopped or best is None or forecast is None:
            return self.stopped or "the search ended"
        return f"its forecast is {forecast * scale / best:.1f} times the best score"


def _shared_start(candidate: Candidate) -> tuple[int, bool]:
    """Return the key by which trials are sorted that can share a start-up: the workers, and whether it is DeepSpeed."""
    return candidate.workers, any(text.startswith((f"{STAGE}=", "strategy=deepspeed")) for text in candidate.family)


def _ran_out(candidate: Candidate) -> bool:
    return any(trial.status in OUT_OF_MEMORY for trial in candidate.trials)

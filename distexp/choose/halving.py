"""Successive halving: which candidates to try, with how many steps, and when to stop.

1. *families*: the best forecast micro-batch of each family, in the order of the forecasts. After each few families the
   forecasts are scaled to the measured scores. Families that cannot reach the best one any more are not tried.
2. *neighbors*: the next smaller and larger micro-batches of the best families, until none is better.
3. *finalists*: the best candidates, again with more steps, half as many after each rung. The order alternates, so that
   a machine that gets slower is no advantage for those that are first.
4. *challengers*: on a busy machine, the repeats may show that the finalists were only lucky. Then a candidate with one
   short trial is the best one. It is repeated as often as the finalists, before it can win.

A search is deterministic: with the same trials it makes the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from distexp.choose.axis_keys import STAGE
from distexp.choose.candidate import Candidate, Objective, Status
from distexp.choose.forecast_scale import best_score, largest_useful_forecast
from distexp.choose.no_winner import describe_no_winner
from distexp.choose.ranking import by_score, ranked
from distexp.choose.search_result import PlannedTrial, Rung, SearchResult, TryAll
from distexp.choose.search_rules import DEFAULT_RULES, SearchRules
from distexp.choose.trial_budget import affordable_trials
from distexp.choose.trial_outcome import add_trial
from distexp.choose.untried import prune_untried

FINALISTS = "finalists"


def nothing_reserved() -> float:
    """Return that the search may use the whole budget."""
    return 0.0


def search(
    candidates: Sequence[Candidate],
    try_all: TryAll,
    objective: Objective,
    budget_gpu_s: float = inf,
    rules: SearchRules = DEFAULT_RULES,
    *,
    reserved_gpu_s: Callable[[], float] = nothing_reserved,
) -> SearchResult:
    """Try candidates until the best one is known, or the budget is used up.

    Status, reason and trials of the candidates are changed in place. A trial that fails does not end the search.

    Args:
        candidates: All candidates. Those that wait may be tried.
        try_all: Runs a batch of trials.
        objective: What the best candidate has least of.
        budget_gpu_s: Most GPU-seconds of all trials together, with the check of the losses. At least one trial is run.
        rules: How thorough the search is.
        reserved_gpu_s: Returns the part of the budget that is for the check of the losses.
    """
    state = _Search(candidates, try_all, objective, budget_gpu_s, rules, reserved_gpu_s)
    state.try_families()
    state.try_neighbors()
    state.try_finalists()
    state.try_challengers()
    prune_untried(state.families.values(), objective, near=rules.near, stopped=state.stopped)
    winner = next(iter(ranked(candidates, objective)), None)
    statement = "" if winner is not None else describe_no_winner(candidates)
    return SearchResult(winner, tuple(candidates), tuple(state.rungs), state.stopped, statement)


def first_trials(
    candidates: Sequence[Candidate], objective: Objective, rules: SearchRules = DEFAULT_RULES
) -> list[PlannedTrial]:
    """Return the trial of one member of each family, in the order in which a search would run them."""
    state = _Search(candidates, lambda batch: [], objective, inf, rules)
    return [PlannedTrial(candidate, rules.steps) for candidate in state.representatives()]


@dataclass
class _Search:
    """A search that runs. The arguments are those of ``search``.

    Attributes:
        rungs: The batches that have ended.
        stopped: Why the search ends early; empty if it does not.
    """

    candidates: Sequence[Candidate]
    try_all: TryAll
    objective: Objective
    budget_gpu_s: float
    rules: SearchRules
    reserved_gpu_s: Callable[[], float] = nothing_reserved
    rungs: list[Rung] = field(default_factory=list)
    stopped: str = ""

    def __post_init__(self) -> None:
        self.families: dict[tuple[str, ...], list[Candidate]] = {}
        for candidate in self.candidates:
            self.families.setdefault(candidate.family, []).append(candidate)
        for members in self.families.values():
            members.sort(key=lambda each: each.micro_batch)

    # Families

    def try_families(self) -> None:
        """Try one member of each family that may be the best."""
        while not self.stopped:
            limit = largest_useful_forecast(self.candidates, self.objective, self.rules)
            useful = [
                candidate for candidate in self.representatives() if (candidate.forecast(self.objective) or 0.0) < limit
            ]
            if not useful:
                return
            self._run("families", useful[: self.rules.wave], self.rules.steps)

    def representatives(self) -> list[Candidate]:
        """Return the best forecast member of each family without a score, the best one first."""
        chosen = [self._representative(members) for members in self.families.values()]
        return sorted((candidate for candidate in chosen if candidate is not None), key=self._order)

    def _representative(self, members: Sequence[Candidate]) -> Candidate | None:
        """Return the best forecast member of a family; None if one has a score, or none waits."""
        if any(member.status is Status.TRIED for member in members):
            return None
        waiting = [member for member in members if member.status is Status.WAITING]
        # Of two with the same forecast, the larger micro-batch launches fewer kernels.
        return min(waiting, key=lambda each: (*self._order(each), -each.micro_batch), default=None)

    def _order(self, candidate: Candidate) -> tuple[bool, float]:
        """Return a key that is smaller for a candidate to try earlier."""
        forecast = candidate.forecast(self.objective)
        return candidate.too_close, inf if forecast is None else forecast

    # Neighbors

    def try_neighbors(self) -> None:
        """Try smaller and larger micro-batches of the best families."""
        for _ in range(self.rules.neighbor_rounds):
            batch = [candidate for members in self._best_families() for candidate in self._neighbors(members)]
            if not batch or self.stopped:
                return
            self._run("neighbors", batch, self.rules.steps)

    def _best_families(self) -> list[list[Candidate]]:
        names = list(dict.fromkeys(candidate.family for candidate in self._within(self.rules.near)))
        return [self.families[name] for name in names[: self.rules.families]]

    def _neighbors(self, members: Sequence[Candidate]) -> list[Candidate]:
        """Return the members next to the best one of a family that are not tried yet."""
        best = by_score(members, self.objective)[0]
        usable = [candidate for candidate in members if candidate.status in (Status.WAITING, Status.TRIED)]
        position = usable.index(best)
        around = usable[max(0, position - 1) : position + 2]
        return [
            candidate
            for candidate in around
            if candidate.status is Status.WAITING and self._may_improve(candidate, best)
        ]

    def _may_improve(self, candidate: Candidate, best: Candidate) -> bool:
        """Return whether a member may be the best, by the forecasts of both. One that may not fit must be better."""
        forecast, known = candidate.forecast(self.objective), best.forecast(self.objective)
        if forecast is None or not known:
            return not candidate.too_close
        if candidate.too_close:
            return forecast < known
        return forecast / known * self._score(best) <= self._best_score() * (1 + self.rules.near)

    # Finalists

    def try_finalists(self) -> None:
        """Try the best candidates again, until two are left. The peak of the memory has no noise."""
        if self.objective is Objective.MEMORY:
            return
        count, steps = self.rules.finalists, self.rules.steps
        while not self.stopped:
            finalists = self._finalists(count)
            if len(finalists) < 2:
                return
            steps *= self.rules.growth
            if len(finalists) == 2:
                self._repeat(finalists, steps)
                return
            self._run(FINALISTS, finalists, steps)
            count = max(2, len(finalists) // 2)

    def try_challengers(self) -> None:
        """Repeat candidates that were tried once, as long as one of them is better than all that were repeated."""
        for _ in range(self.rules.challengers):
            steps = max((each.longest_steps for each in self.candidates), default=0)
            best = next(iter(by_score(self.candidates, self.objective)), None)
            if self.stopped or best is None or best.longest_steps == steps:
                return
            self._repeat([best], steps)

    def _repeat(self, batch: Sequence[Candidate], steps: int) -> None:
        """Run a batch twice, the second time in the other order and without those that failed."""
        self._run(FINALISTS, batch, steps)
        self._run(FINALISTS, [each for each in batch[::-1] if each.status is Status.TRIED], steps)

    def _finalists(self, count: int) -> list[Candidate]:
        """Return the best candidates: at most ``count``, and only the first two if the others are not close."""
        close = self._within(self.rules.close)
        return by_score(self.candidates, self.objective)[: min(count, max(2, len(close)))]

    def _within(self, excess: float) -> list[Candidate]:
        """Return the candidates whose score exceeds the best one by at most a fraction, the best one first."""
        limit = self._best_score() * (1 + excess)
        return [candidate for candidate in by_score(self.candidates, self.objective) if self._score(candidate) <= limit]

    def _score(self, candidate: Candidate) -> float:
        score = candidate.score(self.objective)
        return inf if score is None else score

    def _best_score(self) -> float:
        score = best_score(self.candidates, self.objective)
        return inf if score is None else score

    # Trials

    def _run(self, name: str, batch: Sequence[Candidate], steps: int) -> None:
        """Run a batch of trials, as far as the budget allows."""
        planned = [PlannedTrial(candidate, steps) for candidate in batch]
        reserved = self.reserved_gpu_s()
        affordable = affordable_trials(planned, self.candidates, self.rungs, self.budget_gpu_s - reserved)
        if len(affordable) < len(planned):
            check = f" (of which {reserved:,.0f} for the check of the losses)" if reserved else ""
            self.stopped = f"the budget of {self.budget_gpu_s:,.0f} GPU-seconds{check} is used up"
        if not affordable:
            return
        if name != FINALISTS:  # Their order alternates. The others run so that few of them need another start-up.
            affordable.sort(key=lambda each: _shared_start(each.candidate))
        trials = self.try_all(affordable)
        for started, trial in zip(affordable, trials, strict=True):
            add_trial(started.candidate, trial, self.families[started.candidate.family], self.objective)
        self.rungs.append(Rung(name, tuple(affordable), sum(trial.gpu_seconds for trial in trials)))


def _shared_start(candidate: Candidate) -> tuple[int, bool]:
    """Return the key by which trials are sorted that can share a start-up: the workers, and whether it is DeepSpeed."""
    return candidate.workers, any(text.startswith((f"{STAGE}=", "strategy=deepspeed")) for text in candidate.family)

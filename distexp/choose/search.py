"""The search: which candidates to try, with how many steps, and when to stop.

1. *families*: the best forecast micro-batch of each family, in the order of the forecasts. After the first family, and
   then after each few, the forecasts are scaled to the measured scores. Families that are not expected to improve the
   best score are not tried. If the first one fails, the one that differs most is next. If all fail alike, the search
   ends.
2. *neighbors*: the next smaller and larger micro-batches of the best families, until none is better. Those of the first
   family come before the other families. What they measure shows which micro-batches of the others can be better.
   A trial of both that is far slower than its forecast is repeated at once. If the repeat is far faster, other programs
   have disturbed the first trial, and it does not count.
3. *finalists*: the best candidate and its strongest rival, again with more steps, until no rival can be much better
   within the noise. On a busy machine, the repeats may show that the best one was only lucky. Then the next one is
   repeated, so no candidate wins by one trial. The order alternates, so that a machine that gets slower is no
   advantage for the first one.

A search is deterministic: with the same trials it makes the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter

from distexp.choose.candidate import DEFAULT_RULES, Candidate, Objective, SearchRules, format_worker_time, strategy_in
from distexp.choose.policy import (
    affordable_trials,
    describe_no_winner,
    doubtful_candidates,
    mark_disturbed,
    neighbors_to_try,
    prune_untried,
    representatives,
    useful_representatives,
)
from distexp.choose.predictions.forecast_scale import without_checkpointing
from distexp.choose.ranking import PlannedTrial, Rung, SearchResult, TryAll, candidates_to_repeat, ranked
from distexp.choose.trial_metrics import add_trial, most_different, prune_by_common_error, prune_unmeasured
from distexp.strategies.base import COMMUNICATION, Strategy, shipped_strategies

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
    """Try candidates until the best one is known, or the budget allows no further trial.

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
    state.try_first_family()
    state.try_families()
    state.try_neighbors()
    state.try_finalists()
    prune_untried(state.families.values(), objective, near=rules.near, stopped=state.stopped)
    winner = next(iter(ranked(candidates, objective)), None)
    statement = "" if winner is not None else describe_no_winner(candidates)
    return SearchResult(winner, tuple(candidates), tuple(state.rungs), state.stopped, statement)


def first_trials(
    candidates: Sequence[Candidate], objective: Objective, rules: SearchRules = DEFAULT_RULES
) -> list[PlannedTrial]:
    """Return the trial of one member of each family, in the order in which a search would run them."""
    state = _Search(candidates, lambda batch: [], objective, inf, rules)
    first = representatives(state.families.values(), objective)
    return [PlannedTrial(candidate, rules.steps) for candidate in first]


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
            members.sort(key=attrgetter("micro_batch"))

    # Families

    def try_first_family(self) -> None:
        """Try the family with the best forecast, and its neighbors. A good score leaves out more of the others."""
        first = representatives(self.families.values(), self.objective)[:1]
        if first and first[0].forecast(self.objective) is not None:
            self._try("families", first)
            self.try_neighbors()

    def try_families(self) -> None:
        """Try one member of each family that may be the best."""
        while not self.stopped:
            useful = useful_representatives(self.families.values(), self.objective, self.rules)
            if not useful:
                return
            if (different := most_different(useful, self.candidates)) is not None:
                self._try("families", [different])
                continue
            # One of two families that differ in checkpointing shows whether the other one may be better.
            first_of = {without_checkpointing(candidate): candidate for candidate in reversed(useful)}
            wave = [candidate for candidate in useful if first_of[without_checkpointing(candidate)] is candidate]
            self._try("families", wave[: self.rules.wave])

    # Neighbors

    def try_neighbors(self) -> None:
        """Try smaller and larger micro-batches of the best families."""
        for _ in range(self.rules.neighbor_rounds):
            batch = neighbors_to_try(self.families.values(), self.objective, self.rules)
            if not batch or self.stopped:
                return
            self._try("neighbors", batch)

    # Finalists

    def try_finalists(self) -> None:
        """Repeat the best candidate and its strongest rival, until the best one is certain enough.

        The candidate that ran last is the first one of the next round. The peak of the memory has no noise.
        """
        if self.objective is Objective.MEMORY:
            return
        steps = self.rules.steps * self.rules.growth
        last: Candidate | None = None
        for _ in range(self.rules.repeats):
            batch = candidates_to_repeat(self.candidates, self.objective, self.rules)
            if not batch or self.stopped:
                return
            if batch[-1] is last:
                batch.reverse()
            self._run(FINALISTS, batch, steps)
            last = batch[-1]

    # Trials

    def _try(self, name: str, batch: Sequence[Candidate]) -> None:
        """Run the first trials of a batch, and repeat those that other programs have probably disturbed."""
        self._run(name, batch, self.rules.steps)
        if self.objective is Objective.MEMORY or self.stopped:
            return
        doubtful = list(doubtful_candidates(self.candidates, self.objective, self.rules))
        if doubtful:
            self._run("repeats", doubtful, self.rules.steps)
        for candidate in doubtful:
            mark_disturbed(candidate, self.objective, self.rules)

    def _run(self, name: str, batch: Sequence[Candidate], steps: int) -> None:
        """Run a batch of trials, as far as the budget allows."""
        planned = [PlannedTrial(candidate, steps) for candidate in batch]
        reserved = self.reserved_gpu_s()
        affordable = affordable_trials(planned, self.candidates, self.rungs, self.budget_gpu_s - reserved)
        if not affordable:
            budget = format_worker_time(self.budget_gpu_s, self.candidates)
            self.stopped = f"the budget of {budget}{self._for_check(reserved)} allows no further trial"
            return
        if name != FINALISTS:  # Their order alternates. The others run so that few of them need another start-up.
            affordable.sort(key=_shared_start)
        trials = self.try_all(affordable)
        for started, trial in zip(affordable, trials, strict=True):
            add_trial(started.candidate, trial, self.families[started.candidate.family], self.objective)
        prune_unmeasured(self.candidates, self.objective)
        prune_by_common_error(self.candidates)
        self.rungs.append(Rung(name, tuple(affordable), sum(trial.gpu_seconds for trial in trials)))

    def _for_check(self, reserved_gpu_s: float) -> str:
        """Return how much of the budget the check of the losses needs; empty if it needs nothing."""
        if not reserved_gpu_s:
            return ""
        if reserved_gpu_s >= self.budget_gpu_s:
            return f" (the check of the losses alone needs about {reserved_gpu_s:,.0f})"
        return f" (of which {reserved_gpu_s:,.0f} for the check of the losses)"


def _shared_start(planned: PlannedTrial) -> tuple[int, list[str]]:
    """Return the key by which trials are sorted that can share a start-up: the workers, and the libraries they need."""
    candidate = planned.candidate
    kind = shipped_strategies().get(strategy_in(candidate.family), Strategy)
    return candidate.workers, [name for name in kind.requires if name != COMMUNICATION]

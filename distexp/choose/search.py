"""The search: which candidates to try, with how many steps, and when to stop.

1. *families*: the best forecast micro-batch of each family, in the order of the forecasts. After each few, these are
   scaled to the measured scores. Families that are not expected to improve the best score are not tried. If the first
   one fails, the one that differs most is next. If all fail alike, the search ends.
2. *neighbors*: the next smaller and larger micro-batches of the best families, until none is better. Those of the first
   family come before the other families, and show which micro-batches of the others can be better. A trial of both that
   is far slower than its forecast is repeated at once. If other programs have disturbed it, it does not count.
3. *finalists*: the best candidate and its strongest rival, again with more steps, until no rival can be much better
   within the noise. So no candidate wins by one lucky trial. The order alternates, so that a machine that gets slower
   is no advantage for the first one.

A search is deterministic: with the same trials it makes the same decisions. ``policy`` makes them.
"""

from collections.abc import Callable, Sequence
from math import inf

from distexp.choose.candidate import DEFAULT_RULES, Candidate, Objective, SearchRules, format_worker_time, strategy_in
from distexp.choose.policy import Policy, affordable_trials, prune_by_cause, without_checkpointing
from distexp.choose.ranking import PlannedTrial, Rung, SearchResult, TryAll, by_score, ranked
from distexp.choose.trials import add_trial, most_different, prune_by_common_error, prune_unmeasured, prune_unneeded
from distexp.hardware.facts import gpus_with
from distexp.strategies.base import COMMUNICATION, Strategy, shipped_strategies
from distexp.system.units import MIB_PER_GIB

FINALISTS = "finalists"


def search(
    candidates: Sequence[Candidate],
    try_all: TryAll,
    objective: Objective,
    budget_gpu_s: float = inf,
    rules: SearchRules = DEFAULT_RULES,
    *,
    reserved_gpu_s: Callable[[], float] = lambda: 0.0,
) -> SearchResult:
    """Try candidates until the best one is known, or the budget allows no further trial.

    Status, reason and trials of the candidates are changed in place. A trial that fails does not end the search.

    Args:
        candidates: All candidates. Those that wait may be tried.
        try_all: Runs a batch of trials.
        objective: What the best candidate has least of.
        budget_gpu_s: Most GPU-seconds of all trials together. At least one trial is run.
        rules: How thorough the search is.
        reserved_gpu_s: Returns the part of the budget that is for the check of the losses.
    """
    policy = Policy(candidates, objective, rules)
    state = _Search(policy, try_all, budget_gpu_s, reserved_gpu_s)
    state.try_first_family()
    state.try_families()
    state.try_neighbors()
    state.try_finalists()
    prune_untried(policy, state.stopped)
    winner = next(iter(ranked(candidates, objective)), None)
    statement = "" if winner is not None else describe_no_winner(candidates)
    return SearchResult(winner, tuple(candidates), tuple(state.rungs), state.stopped, statement)


def first_trials(candidates: Sequence[Candidate], objective: Objective) -> list[PlannedTrial]:
    """Return the trial of one member of each family, in the order in which a search would run them."""
    policy = Policy(candidates, objective, DEFAULT_RULES)
    return [PlannedTrial(candidate, policy.rules.steps) for candidate in policy.representatives()]


class _Search:
    """A search that runs. The arguments are those of ``search``."""

    def __init__(
        self, policy: Policy, try_all: TryAll, budget_gpu_s: float, reserved_gpu_s: Callable[[], float]
    ) -> None:
        self.policy, self.rules, self.try_all = policy, policy.rules, try_all
        self.budget_gpu_s, self.reserved_gpu_s = budget_gpu_s, reserved_gpu_s
        self.has_noise = policy.objective is not Objective.MEMORY  # The peak of the memory has none.
        self.rungs: list[Rung] = []  # the batches that have ended
        self.stopped = ""  # why the search ends early; empty if it does not

    def try_first_family(self) -> None:
        """Try the family with the best forecast, and its neighbors. A good score leaves out more of the others."""
        first = self.policy.representatives()[:1]
        if first and first[0].forecast(self.policy.objective) is not None:
            self._try("families", first)
            self.try_neighbors()

    def try_families(self) -> None:
        while not self.stopped and (useful := self.policy.useful_representatives()):
            if (different := most_different(useful, self.policy.candidates)) is not None:
                self._try("families", [different])
                continue
            # One of two families that differ in checkpointing shows whether the other one may be better.
            first_of = {without_checkpointing(candidate): candidate for candidate in reversed(useful)}
            wave = [candidate for candidate in useful if first_of[without_checkpointing(candidate)] is candidate]
            self._try("families", wave[: self.rules.wave])

    def try_neighbors(self) -> None:
        for _ in range(self.rules.neighbor_rounds):
            batch = self.policy.neighbors_to_try()
            if not batch or self.stopped:
                return
            self._try("neighbors", batch)

    def try_finalists(self) -> None:
        """Repeat the best candidate and its strongest rival, the last one first, until the best one is certain."""
        last: Candidate | None = None
        for _ in range(self.rules.repeats if self.has_noise else 0):
            batch = self.policy.candidates_to_repeat()
            if not batch or self.stopped:
                return
            if batch[-1] is last:
                batch.reverse()
            self._run(FINALISTS, batch, self.rules.steps * self.rules.growth)
            last = batch[-1]

    def _try(self, name: str, batch: Sequence[Candidate]) -> None:
        """Run the first trials of a batch, and repeat those that other programs have probably disturbed."""
        self._run(name, batch, self.rules.steps)
        if not self.has_noise or self.stopped:
            return
        doubtful = list(self.policy.doubtful_candidates())
        if doubtful:
            self._run("repeats", doubtful, self.rules.steps)
        for candidate in doubtful:
            self.policy.mark_disturbed(candidate)

    def _run(self, name: str, batch: Sequence[Candidate], steps: int) -> None:
        planned = [PlannedTrial(candidate, steps) for candidate in batch]
        candidates, reserved = self.policy.candidates, self.reserved_gpu_s()
        spent = sum(rung.gpu_seconds for rung in self.rungs)
        affordable = affordable_trials(planned, candidates, spent, self.budget_gpu_s - reserved)
        if not self.rungs:  # The first trial of a search is always allowed.
            affordable = affordable or planned[:1]
        if not affordable:
            budget, check = format_worker_time(self.budget_gpu_s, candidates), ""
            if reserved and reserved >= self.budget_gpu_s:
                check = f" (the check of the losses alone needs about {reserved:,.0f})"
            elif reserved:
                check = f" (of which {reserved:,.0f} for the check of the losses)"
            self.stopped = f"the budget of {budget}{check} allows no further trial"
            return
        if name != FINALISTS:  # Their order alternates. The others run so that few of them need another start-up.
            affordable.sort(key=_shared_start)
        trials = self.try_all(affordable)
        for started, trial in zip(affordable, trials, strict=True):
            family = self.policy.families[started.candidate.family]
            add_trial(started.candidate, trial, family, self.policy.objective)
        prune_unmeasured(candidates, self.policy.objective)
        prune_unneeded(candidates, self.policy.objective)
        prune_by_cause(candidates)
        prune_by_common_error(candidates)
        self.rungs.append(Rung(name, tuple(affordable), sum(trial.gpu_seconds for trial in trials)))


def _shared_start(planned: PlannedTrial) -> tuple[int, list[str]]:
    """Return the key by which trials are sorted that can share a start-up: the workers, and the libraries they need."""
    candidate = planned.candidate
    kind = shipped_strategies().get(strategy_in(candidate.family), Strategy)
    return candidate.workers, [name for name in kind.requires if name != COMMUNICATION]


NOT_TRIED = "not tried"  # start of the reason of a candidate that fits, and that the search left out
NEEDED = {Objective.THROUGHPUT: "time", Objective.ENERGY: "energy", Objective.COST: "price", Objective.MEMORY: "memory"}
"""What an objective minimizes."""


def prune_untried(policy: Policy, stopped: str) -> None:
    """Prune the candidates that still wait, with the reason why they were not tried, or what ``stopped`` the search."""
    objective, best, needed = policy.objective, policy.best_score, NEEDED[policy.objective]
    for members in policy.families.values():
        tried = by_score(members, objective)
        reason_of_family = ""
        if tried and best:
            micro_batch = f"micro-batch {tried[0].micro_batch} of this family"
            ratio = tried[0].known_score(objective) / best
            if ratio > 1 + policy.rules.near:
                reason_of_family = f"{micro_batch} needs {ratio:.1f} times the {needed} of the best"
            elif not stopped:
                reason_of_family = f"{micro_batch} is measured or forecast to be better"
        for waiting in (member for member in members if member.is_waiting):
            expected = policy.scaled_forecast(waiting)
            ratio_of_forecast = None if best is None or expected is None else expected / best
            reason = reason_of_family or _reason_of_forecast(waiting, ratio_of_forecast, needed, stopped)
            waiting.prune(f"{NOT_TRIED}: {reason}")


def _reason_of_forecast(candidate: Candidate, ratio: float | None, needed: str, stopped: str) -> str:
    if stopped or ratio is None:
        return stopped or "the search ended"
    if ratio <= 1 and candidate.too_close:
        return "it probably does not fit"
    if abs(ratio - 1) < 0.005:  # 1.00 with two decimals
        return f"its forecast needs as much {needed} as the best"
    shown = f"{ratio:.1f}" if ratio >= 1.05 else f"{ratio:.2f}"
    return f"its forecast is {shown} times the {needed} of the best"


def describe_no_winner(candidates: Sequence[Candidate]) -> str:
    """Return why no candidate completed, with the configuration that needs the least memory."""
    failed = [candidate for candidate in candidates if candidate.has_failed]
    known = [candidate for candidate in failed or candidates if candidate.required_mib is not None]
    nearest = min(known, key=lambda candidate: candidate.required_mib or 0.0, default=None)
    if failed:
        has_completed = any(candidate.completed for candidate in failed)
        text = f"{'no candidate has a result' if has_completed else 'no trial completed'}: {failed[0].reason}"
        if nearest is None or not all(candidate.ran_out_of_memory for candidate in failed):
            return text
    elif nearest is None:
        reason = next((candidate.reason for candidate in candidates if candidate.reason), "")
        return f"no candidate can be tried: {reason}" if reason else "no candidate can be tried"
    else:
        text = "no candidate fits into the memory"
    return f"{text}; the nearest one is {_describe_nearest(nearest)}"


def _describe_nearest(candidate: Candidate) -> str:
    """Return the overrides of a candidate, what it needs, and the GPUs on which it fits."""
    predicted = candidate.predicted
    assert predicted is not None, "the caller chose a predicted one"
    needed, most = predicted.required_mib or 0.0, predicted.most_mib or predicted.required_mib or 0.0
    memory = predicted.gpu_memory_mib or predicted.host_memory_mib
    limit = "" if memory is None else f" of {memory / MIB_PER_GIB:,.1f} GiB"
    text = f"{' '.join(candidate.overrides)}, which needs {needed / MIB_PER_GIB:,.1f} GiB{limit}"
    if predicted.host_memory_mib is not None:
        return f"{text}: use fewer workers, or a machine with at least {most / MIB_PER_GIB:,.1f} GiB"
    fitting = gpus_with(most)
    return f"{text}: it fits on {fitting[0]} and larger" if fitting else f"{text}: it fits on no known GPU"

"""What a trial means for its candidate, and for the other members of its family."""

from __future__ import annotations

from collections.abc import Sequence

from distexp.choose.candidate import COMPLETED, OUT_OF_MEMORY, Candidate, Objective, Status, Trial

UNMEASURED = {
    Objective.THROUGHPUT: "the run measured no throughput",
    Objective.ENERGY: "the run measured no energy: use choose.objective=throughput",
    Objective.COST: "the run has no price: set cluster.price_per_gpu_hour",
    Objective.MEMORY: "the run measured no memory",
}
"""Why a completed trial has no score."""

NOT_ADVANCED = "its measured value is 0: the counter did not advance in so short a run"
"""Why a completed trial with a value of 0 has no score."""

MAX_FAILURES = 1
"""Most trials of a family that may fail for another reason than memory before the rest of the family is pruned."""


def add_trial(candidate: Candidate, trial: Trial, family: Sequence[Candidate], objective: Objective) -> None:
    """Add a trial to its candidate, and set the status. If it failed, prune what would fail too.

    Args:
        candidate: The candidate that was tried.
        trial: Its trial.
        family: All members of its family.
        objective: The objective, whose metric the trial must have measured.
    """
    candidate.trials = (*candidate.trials, trial)
    if trial.status == COMPLETED:
        known = candidate.score(objective) is not None
        candidate.status = Status.TRIED if known else Status.FAILED
        candidate.reason = "" if known else _why_unmeasured(trial, objective)
        return
    candidate.status = Status.FAILED
    ran_out = trial.status in OUT_OF_MEMORY
    candidate.reason = trial.error or ("it ran out of memory" if ran_out else f"the run is {trial.status}")
    if ran_out:
        _prune_larger(candidate, family)
    _prune_failing_family(candidate.reason, family)


def prune_unmeasured(candidates: Sequence[Candidate], objective: Objective) -> None:
    """Prune all that wait if trials have completed and none measured the objective, because others will not either."""
    completed = [trial for candidate in candidates for trial in candidate.completed]
    if completed and all(trial.measured(objective) is None for trial in completed):
        for waiting in (candidate for candidate in candidates if candidate.status is Status.WAITING):
            waiting.prune(UNMEASURED[objective])


def _why_unmeasured(trial: Trial, objective: Objective) -> str:
    """Return why a completed trial has no score."""
    return UNMEASURED[objective] if trial.measured(objective) is None else NOT_ADVANCED


def _prune_larger(candidate: Candidate, family: Sequence[Candidate]) -> None:
    """Prune the members with a larger micro-batch than that of a candidate that ran out of memory."""
    size = candidate.micro_batch
    for member in family:
        if member.status is Status.WAITING and member.micro_batch > size:
            member.prune(f"micro-batch {member.micro_batch} needs more than {size}, which ran out of memory")


def _prune_failing_family(reason: str, family: Sequence[Candidate]) -> None:
    """Prune the rest of a family if too many of its trials failed for another reason than memory."""
    failed = [candidate for candidate in family if candidate.status is Status.FAILED and not _ran_out(candidate)]
    if len(failed) <= MAX_FAILURES:
        return
    for member in family:
        if member.status is Status.WAITING:
            member.prune(f"{len(failed)} trials of this family failed: {reason}")


def _ran_out(candidate: Candidate) -> bool:
    return any(trial.status in OUT_OF_MEMORY for trial in candidate.trials)

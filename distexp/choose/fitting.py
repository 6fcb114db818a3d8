"""Which of the candidates that may not fit are tried: those that probably fit, by the prediction and by the trials."""

from __future__ import annotations

from collections.abc import Iterable

from distexp.choose.candidate import OOM_GPU, OOM_HOST, Candidate
from distexp.choose.search_rules import SearchRules
from distexp.plan.verdict import available_mib


def allowed_if_too_close(candidate: Candidate, candidates: Iterable[Candidate], rules: SearchRules) -> float:
    """Return the most that the expected score of a candidate that may not fit may be, relative to the best one."""
    return 1.0 if probably_fits(candidate, candidates) else 1 - rules.worthwhile


def probably_fits(candidate: Candidate, candidates: Iterable[Candidate]) -> bool:
    """Return whether a candidate fits if the prediction has no error, or if one that needs as much has completed.

    The memory is that of a GPU, or on CPUs that of a node. It does not fit if one that needs less ran out of it.

    Args:
        candidate: A candidate. If it may not fit, and its memory is unknown, it probably does not.
        candidates: All candidates.
    """
    if not candidate.too_close:
        return True
    needed, memory = required_mib(candidate), available_mib(candidate.predicted) if candidate.predicted else None
    if needed is None or memory is None:
        return False
    tried = [(other, required_mib(other)) for other in candidates if other.trials]
    known = [(other, required) for other, required in tried if required is not None]
    if any(_ran_out_of_memory(other) and required <= needed for other, required in known):
        return False
    return needed <= max([memory, *(required for other, required in known if other.completed)])


def required_mib(candidate: Candidate) -> float | None:
    """Return the predicted MiB of a candidate, of a GPU or on CPUs of a node; None if it was not predicted."""
    return None if candidate.predicted is None else candidate.predicted.required_mib


def _ran_out_of_memory(candidate: Candidate) -> bool:
    """Return whether a trial ran out of the memory that was predicted: that of a GPU, or on CPUs that of a node."""
    return any(trial.status == (OOM_HOST if candidate.on_cpus else OOM_GPU) for trial in candidate.trials)

"""Why a search has no winner, with the configuration that needs the least memory."""

from __future__ import annotations

from collections.abc import Sequence

from distexp.choose.candidate import OUT_OF_MEMORY, Candidate, Status
from distexp.hardware.facts import gpus_with
from distexp.system.units import MIB_PER_GB


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

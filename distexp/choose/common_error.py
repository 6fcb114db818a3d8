"""Errors that all candidates have in common, such as a data set that cannot be read. They end a search early."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from distexp.choose.axis_keys import STRATEGY, STRATEGY_OF
from distexp.choose.candidate import Candidate, Status

UNSUCCESSFUL = ("failed", "invalid")
"""Statuses of trials whose error may concern all candidates. Too little memory, or too little time, does not."""


def prune_by_common_error(candidates: Sequence[Candidate]) -> None:
    """Prune all candidates that wait if no trial completed, and no setting explains why the others failed.

    A setting explains an error if all trials that failed have it, and some candidate that waits does not.

    Args:
        candidates: All candidates of the search.
    """
    failed = _failed_alike(candidates)
    if len(failed) < 2:
        return
    waiting = [candidate for candidate in candidates if candidate.status is Status.WAITING]
    common = _common_settings(failed, waiting)
    if all(common <= _settings(candidate, dict(common)) for candidate in waiting):
        for candidate in waiting:
            candidate.prune(f"{len(failed)} trials with other settings failed: {failed[0].trials[-1].error}")


def most_different(waiting: Sequence[Candidate], candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the candidate with the fewest settings that all failed ones have.

    Args:
        waiting: Candidates that may be tried, the best forecast first.
        candidates: All candidates of the search.

    Returns:
        None if a trial completed, none failed, or the errors differ.
    """
    failed = _failed_alike(candidates)
    if not failed:
        return None
    common = _common_settings(failed, waiting)
    return min(waiting, key=lambda candidate: len(common & _settings(candidate, dict(common))), default=None)


def _failed_alike(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates that failed, if no trial completed and all have the same error; else none."""
    tried = [candidate for candidate in candidates if candidate.trials]
    failed = [candidate for candidate in tried if candidate.trials[-1].status in UNSUCCESSFUL]
    errors = {candidate.trials[-1].error for candidate in failed}
    if len(errors) != 1 or "" in errors or any(candidate.completed for candidate in tried):
        return []
    return failed


def _common_settings(failed: Sequence[Candidate], waiting: Sequence[Candidate]) -> set[tuple[str, str]]:
    """Return the settings that all failed candidates have, as pairs of key and value."""
    keys = {key for candidate in (*failed, *waiting) for key, _ in _overrides(candidate)}
    return set.intersection(*(_settings(candidate, keys) for candidate in failed))


def _settings(candidate: Candidate, keys: Iterable[str]) -> set[tuple[str, str]]:
    """Return the values that a candidate has for some keys; an empty one for a key that it does not override.

    A sharding or a stage that it does not have is no setting, because its strategy implies it.
    """
    values = dict(_overrides(candidate))
    return {(key, values.get(key, "")) for key in keys if key in values or key not in STRATEGY_OF}


def _overrides(candidate: Candidate) -> Iterator[tuple[str, str]]:
    """Yield the overrides as pairs of key and value. A sharding or a stage also names its strategy."""
    for override in candidate.overrides:
        key, _, value = override.partition("=")
        if key in STRATEGY_OF:
            yield STRATEGY, STRATEGY_OF[key]
        yield key, value

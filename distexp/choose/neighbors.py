"""The neighbors to try: the next smaller and larger micro-batches of the families that were tried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from statistics import median

from distexp.choose.axis_keys import KERNELS
from distexp.choose.candidate import Candidate, Objective, Status
from distexp.choose.fitting import allowed_if_too_close
from distexp.choose.forecast_scale import best_score, fewer_launches_factor
from distexp.choose.ranking import by_score
from distexp.choose.search_rules import SearchRules


def neighbors_to_try(
    families: Iterable[Sequence[Candidate]], objective: Objective, rules: SearchRules
) -> list[Candidate]:
    """Return the members next to the best ones of their families that may be the best of all.

    Args:
        families: All candidates, by family and in the order of their micro-batches.
        objective: The objective of the search.
        rules: How much the expected scores are trusted, and of how many families neighbors are tried.
    """
    candidates = [member for members in families for member in members]
    found: list[Candidate] = []
    for known in _best_members(families, objective):
        around = _untried_neighbors(known, [each for each in candidates if each.family == known.family])
        found += [each for each in around if _may_be_best(each, known, candidates, objective, rules)]
        if len({each.family for each in found}) == rules.families:
            break
    return found


def _best_members(families: Iterable[Sequence[Candidate]], objective: Objective) -> list[Candidate]:
    """Return the best member of each family that was tried, the best one of all first."""
    return by_score((member for members in families for member in by_score(members, objective)[:1]), objective)


def _untried_neighbors(known: Candidate, members: Sequence[Candidate]) -> Iterator[Candidate]:
    usable = [candidate for candidate in members if candidate.status in (Status.WAITING, Status.TRIED)]
    position = usable.index(known)
    around = usable[max(0, position - 1) : position + 2]
    yield from (candidate for candidate in around if candidate.status is Status.WAITING)


def _may_be_best(
    candidate: Candidate,
    known: Candidate,
    candidates: Sequence[Candidate],
    objective: Objective,
    rules: SearchRules,
) -> bool:
    """Return whether a member may be the best one of all. One that may not fit must be expected to be better.

    Args:
        candidate: A member that was not tried.
        known: The best member of its family.
        candidates: All candidates.
        objective: The objective of the search.
        rules: How much the expected scores are trusted.
    """
    own = (known.score(objective) or 0.0) / (best_score(candidates, objective) or inf)
    measured = _measured_ratio(candidate, known, candidates, objective)
    forecast, forecast_of_known = candidate.forecast(objective), known.forecast(objective)
    if measured is None and (forecast is None or not forecast_of_known):
        return own <= 1 + rules.near and not candidate.too_close
    fewer_launches = fewer_launches_factor(known, candidate, objective)
    ratio = measured or (forecast or 0.0) / (forecast_of_known or 1.0) * fewer_launches
    if candidate.too_close:
        return ratio * own < allowed_if_too_close(candidate, candidates, rules)
    # A smaller micro-batch launches more kernels and reads the weights more often. It is rarely better than forecast.
    if candidate.micro_batch < known.micro_batch:
        return ratio * own <= 1
    return ratio * own <= 1 + (rules.neighbor_forecast if measured is None else rules.neighbor_certain)


def _measured_ratio(
    candidate: Candidate, known: Candidate, candidates: Sequence[Candidate], objective: Objective
) -> float | None:
    """Return the ratio of the scores of two members of a family, as measured in other families.

    Only families with the same workers and kernels count, because others saturate a GPU at another micro-batch.

    Returns:
        The median over these families; None if no other family has both micro-batches.
    """
    scores: dict[tuple[str, ...], dict[int, float]] = {}
    for other in candidates:
        score = other.score(objective) if other.status is Status.TRIED else None
        if score and other.family != candidate.family and _curve(other) == _curve(candidate):
            scores.setdefault(other.family, {})[other.micro_batch] = score
    sizes = candidate.micro_batch, known.micro_batch
    ratios = [found[sizes[0]] / found[sizes[1]] for found in scores.values() if all(size in found for size in sizes)]
    return median(ratios) if ratios else None


def _curve(candidate: Candidate) -> tuple[int, list[str]]:
    """Return what decides at which micro-batch a GPU is saturated."""
    return candidate.workers, [text for text in candidate.family if text.startswith(f"{KERNELS}=")]

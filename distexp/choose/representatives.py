"""Which member of a family is tried first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

from distexp.choose.candidate import Candidate, Objective, Status
from distexp.choose.fitting import probably_fits
from distexp.choose.forecast_scale import best_score, useful_forecasts
from distexp.choose.search_rules import SearchRules

Families = Iterable[Sequence[Candidate]]
"""All candidates, by family and in the order of their micro-batches."""


def representatives(families: Families, objective: Objective, *, only_certain: bool = False) -> list[Candidate]:
    """Return the best forecast member of each family without a score, the best one first.

    One that may not fit, but probably does, is chosen only after the first score, because then its forecast is compared
    with that. The others that may not fit are chosen only if the family has no other member.

    Args:
        families: All candidates, by family.
        objective: The objective of the search.
        only_certain: Whether members that may not fit are left out.
    """
    members_of_families = list(families)
    order = _order([member for members in members_of_families for member in members], objective)
    chosen = []
    for members in members_of_families:
        waiting = [each for each in members if each.status is Status.WAITING and not (only_certain and each.too_close)]
        if waiting and not any(member.status is Status.TRIED for member in members):
            # Of two with the same forecast, the larger micro-batch launches fewer kernels.
            chosen.append(min(reversed(waiting), key=order))
    return sorted(chosen, key=order)


def useful_representatives(families: Families, objective: Objective, rules: SearchRules) -> list[Candidate]:
    """Return a member of each family without a score that may still be the best one, the best forecast first.

    If a member that may not fit is not worth its risk, another member of its family may be worth a trial.
    """
    members_of_families = list(families)
    candidates = [member for members in members_of_families for member in members]
    found = useful_forecasts(representatives(members_of_families, objective), candidates, objective, rules)
    known = {candidate.family for candidate in found}
    certain = representatives(members_of_families, objective, only_certain=True)
    others = [candidate for candidate in certain if candidate.family not in known]
    found += useful_forecasts(others, candidates, objective, rules)
    return sorted(found, key=_order(candidates, objective))


def _order(candidates: Sequence[Candidate], objective: Objective) -> Callable[[Candidate], tuple[bool, bool, float]]:
    """Return the key that is smaller for a candidate to try earlier."""
    scored = best_score(candidates, objective) is not None

    def key(candidate: Candidate) -> tuple[bool, bool, float]:
        forecast = candidate.forecast(objective)
        uncertain = not scored and candidate.too_close
        return uncertain, not probably_fits(candidate, candidates), inf if forecast is None else forecast

    return key

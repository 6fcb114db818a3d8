"""Why the candidates that still wait at the end of a search were not tried."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from distexp.choose.candidate import Candidate, Objective, Status
from distexp.choose.forecast_scale import best_score, forecast_scales
from distexp.choose.ranking import by_score

NOT_TRIED = "not tried"
"""Start of the reason of a candidate that fits, and that the search left out."""


def prune_untried(families: Iterable[Sequence[Candidate]], objective: Objective, *, near: float, stopped: str) -> None:
    """Prune the candidates that still wait, with the reason why they were not tried.

    Args:
        families: All candidates, by family.
        objective: The objective of the search.
        near: Most that a family's score may exceed the best one if its other members are tried, relative to it.
        stopped: Why the search ended early; empty if it ended by itself.
    """
    members_of_families = list(families)
    candidates = [member for members in members_of_families for member in members]
    best, scales = best_score(candidates, objective), forecast_scales(candidates, objective)
    scale = median(scales) if scales else 1.0
    for members in members_of_families:
        tried = by_score(members, objective)
        for waiting in (member for member in members if member.status is Status.WAITING):
            reason = ""
            if tried and best:
                reason = _reason_of_family(tried[0], (tried[0].score(objective) or 0.0) / best, near, stopped)
            forecast = waiting.forecast(objective)
            ratio = None if best is None or forecast is None else forecast * scale / best
            waiting.prune(f"{NOT_TRIED}: {reason or _reason_of_forecast(ratio, stopped)}")


def _reason_of_family(best_member: Candidate, ratio: float, near: float, stopped: str) -> str:
    """Return why the other members of a family were not tried; empty if only the early end is the reason.

    Args:
        best_member: The best member that was tried.
        ratio: Its score relative to the best one of all.
        near: As for ``prune_untried``.
        stopped: As for ``prune_untried``.
    """
    if ratio > 1 + near:
        return f"micro-batch {best_member.micro_batch} of this family is {ratio:.1f} times worse than the best"
    return "" if stopped else f"micro-batch {best_member.micro_batch} is measured or forecast to be better"


def _reason_of_forecast(ratio: float | None, stopped: str) -> str:
    """Return why no member of a family was tried.

    Args:
        ratio: Scaled forecast relative to the best score; None if one of both is unknown.
        stopped: As for ``prune_untried``.
    """
    if stopped or ratio is None:
        return stopped or "the search ended"
    return f"its forecast is {ratio:.1f} times worse than the best"

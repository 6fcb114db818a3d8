"""Why the candidates that still wait at the end of a search were not tried."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from distexp.choose.candidate import Candidate, Objective, Status
from distexp.choose.forecast_scale import best_score, scaled_forecast
from distexp.choose.ranking import by_score

NOT_TRIED = "not tried"
"""Start of the reason of a candidate that fits, and that the search left out."""

LOOKS_EQUAL = 0.005
"""Ratios that are nearer to 1 look like 1 with two decimals."""

LOOKS_LIKE_ONE = 1.05
"""Smaller ratios look like 1 or less with one decimal."""

NEEDED = {
    Objective.THROUGHPUT: "time",
    Objective.ENERGY: "energy",
    Objective.COST: "price",
    Objective.MEMORY: "memory",
}
"""What an objective minimizes."""


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
    best = best_score(candidates, objective)
    for members in members_of_families:
        tried = by_score(members, objective)
        for waiting in (member for member in members if member.status is Status.WAITING):
            reason = ""
            if tried and best:
                ratio = (tried[0].score(objective) or 0.0) / best
                reason = _reason_of_family(tried[0], ratio, NEEDED[objective], near=near, stopped=stopped)
            if not reason:
                expected = scaled_forecast(waiting, candidates, objective)
                ratio_of_forecast = None if best is None or expected is None else expected / best
                reason = _reason_of_forecast(waiting, ratio_of_forecast, NEEDED[objective], stopped)
            waiting.prune(f"{NOT_TRIED}: {reason}")


def _reason_of_family(best_member: Candidate, ratio: float, needed: str, *, near: float, stopped: str) -> str:
    """Return why the other members of a family were not tried; empty if only the early end is the reason.

    Args:
        best_member: The best member that was tried.
        ratio: Its score relative to the best one of all.
        needed: What the objective minimizes.
        near: As for ``prune_untried``.
        stopped: As for ``prune_untried``.
    """
    micro_batch = f"micro-batch {best_member.micro_batch} of this family"
    if ratio > 1 + near:
        return f"{micro_batch} needs {ratio:.1f} times the {needed} of the best"
    return "" if stopped else f"{micro_batch} is measured or forecast to be better"


def _reason_of_forecast(candidate: Candidate, ratio: float | None, needed: str, stopped: str) -> str:
    """Return why no member of a family was tried.

    Args:
        candidate: A member.
        ratio: Scaled forecast relative to the best score; None if one of both is unknown.
        needed: What the objective minimizes.
        stopped: As for ``prune_untried``.
    """
    if stopped or ratio is None:
        return stopped or "the search ended"
    if ratio <= 1 and candidate.too_close:
        return "it probably does not fit"
    if abs(ratio - 1) < LOOKS_EQUAL:
        return f"its forecast needs as much {needed} as the best"
    return f"its forecast is {_format_ratio(ratio)} times the {needed} of the best"


def _format_ratio(ratio: float) -> str:
    """Return a ratio with one decimal, or with two if it would look like 1 or less."""
    return f"{ratio:.1f}" if ratio >= LOOKS_LIKE_ONE else f"{ratio:.2f}"

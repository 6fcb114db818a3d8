"""Trade-offs: candidates that give up something for something else, beyond the noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distexp.choose.candidate import Candidate, Objective
from distexp.choose.labels import label
from distexp.choose.mean_metrics import MeanMetrics, mean_metrics
from distexp.choose.ranking import margin_between
from distexp.choose.result_texts import format_noise

SAME = 0.02
"""Relative difference from which a change is worth a mention."""

MORE_AND_LESS = {
    Objective.THROUGHPUT: ("faster", "slower"),
    Objective.MEMORY: ("more memory", "less memory"),
    Objective.ENERGY: ("more energy", "less energy"),
    Objective.COST: ("more expensive", "cheaper"),
}
"""What a larger and a smaller value of a candidate is called."""

BETTER = ("faster", "less memory", "less energy", "cheaper")
"""Changes for which another configuration may be preferred to the winner."""


def trade_offs(candidates: Sequence[Candidate], winner: Candidate) -> Iterator[str]:
    """Yield the candidates that no other one beats in everything, with what they cost and give beyond the noise."""
    measured = [(each, mean_metrics(each)) for each in candidates if each.completed]
    for candidate, values in measured:
        others = [other for each, other in measured if each is not candidate]
        if candidate is winner or any(other.dominates(values) for other in others):
            continue
        changes = ", ".join(_changes(candidate, winner, candidates))
        if any(better in changes for better in BETTER):
            yield f"{label(candidate)}: {changes}"


def _changes(candidate: Candidate, winner: Candidate, candidates: Sequence[Candidate]) -> Iterator[str]:
    """Yield how a candidate differs from the winner: ``3 % slower``, ``40 % less memory``."""
    own, best = mean_metrics(candidate), mean_metrics(winner)
    for objective, (more, less) in MORE_AND_LESS.items():
        change = _relative_change(own, best, objective)
        margin = margin_between(winner, candidate, objective, candidates)
        if change is None or margin is None or abs(change) < SAME:
            continue
        if not margin.is_noise:
            yield f"{100 * abs(change):.0f} % {more if change > 0 else less}"
        elif objective is Objective.THROUGHPUT:
            yield f"equal speed within the noise of ±{format_noise(margin)}"


def _relative_change(own: MeanMetrics, other: MeanMetrics, objective: Objective) -> float | None:
    """Return by how much a value is larger than another, relative to it; None if one of both is unknown."""
    mine, theirs = own.value(objective), other.value(objective)
    return mine / theirs - 1 if mine and theirs else None

"""What is known of a search so far, and its document for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from distexp.choose.candidate import Candidate, Status
from distexp.choose.equal_candidates import equal_candidates, simplest
from distexp.choose.loss_check import LossCheck
from distexp.choose.mean_metrics import mean_metrics, measured_json
from distexp.choose.result_texts import (
    command_line,
    training_overrides,
    winner_sentence,
)
from distexp.choose.search_result import SearchResult
from distexp.choose.settings import Settings
from distexp.runs.command_text import format_override


@dataclass(frozen=True)
class Rejected:
    """A candidate that was better than the winner, but whose losses differ."""

    candidate: Candidate
    check: LossCheck


@dataclass
class Outcome:
    """What is known of a search so far.

    Attributes:
        settings: Settings of the search.
        candidates: All candidates.
        result: Result of the search; None before its end.
        winner: The winner, whose losses were checked; None before the end, or if there is none.
        check: Check of the winner's losses.
        rejected: Better candidates whose losses differ.
        finished: Whether the losses were checked, too.
    """

    settings: Settings
    candidates: Sequence[Candidate]
    result: SearchResult | None = None
    winner: Candidate | None = None
    check: LossCheck | None = None
    rejected: list[Rejected] = field(default_factory=list)
    finished: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the document, without the costs and trials that the state of the search adds."""
        return {
            "winner": self._winner_json(),
            "sentence": self.sentence,
            "statement": self.statement,
            "equal": list(map(typed_overrides, self.equal)),
            "simplest": None if self.winner is None else typed_overrides(simplest([self.winner, *self.equal])),
            "finished": self.finished,
            "objective": str(self.settings.objective),
            "losses": self.check.to_json() if self.check else None,
            "rejected": [
                {"overrides": typed_overrides(rejection.candidate), **rejection.check.to_json()}
                for rejection in self.rejected
            ],
            "candidates": [candidate_json(candidate) for candidate in self.candidates],
        }

    def _winner_json(self) -> dict[str, Any] | None:
        if self.winner is None:
            return None
        values = mean_metrics(self.winner)
        return {
            "overrides": typed_overrides(self.winner),
            "samples_per_second": values.samples_per_second,
            "peak_allocated_mib": values.peak_allocated_mib,
            "command": command_line(self.settings.command, self.winner),
            "all_overrides": training_overrides(self.settings.command, self.winner),
        }

    @property
    def statement(self) -> str:
        """Return why there is no winner, or why the search ended early; empty if neither is so."""
        if self.result is None:
            return ""
        if self.winner is None and self.rejected:
            return f"no winner: the losses of the {len(self.rejected)} best configurations differ from the reference"
        return self.result.statement or self.result.stopped

    @property
    def sentence(self) -> str:
        """Return the winner with its evidence; empty if there is none."""
        if self.winner is None or self.result is None:
            return ""
        return winner_sentence(self.usable, self.winner, self.settings.objective)

    @property
    def equal(self) -> list[Candidate]:
        """Return the other candidates that are as good as the winner within the noise; empty without a winner."""
        if self.winner is None:
            return []
        return equal_candidates(self.usable, self.winner, self.settings.objective)

    @property
    def usable(self) -> list[Candidate]:
        """Return the candidates that were tried, without the families of those whose losses differ."""
        rejected = [rejection.candidate.family for rejection in self.rejected]
        return [
            candidate
            for candidate in self.candidates
            if candidate.status is Status.TRIED and candidate.family not in rejected
        ]


def typed_overrides(candidate: Candidate) -> list[str]:
    """Return the overrides of a candidate as a user would type them."""
    return list(map(format_override, candidate.overrides))


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """Return a candidate for programs."""
    return {
        "overrides": typed_overrides(candidate),
        "status": str(candidate.status),
        "reason": candidate.reason or None,
        "predicted": None if candidate.predicted is None else asdict(candidate.predicted),
        "expected_mib": candidate.expected_mib,
        "forecast_s": candidate.forecast_s,
        "measured": measured_json(candidate),
    }

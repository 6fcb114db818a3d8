"""Output of a search: its document for programs, and what is printed for users."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from distexp.choose.candidate import Candidate, Status
from distexp.choose.labels import label
from distexp.choose.loss_check import LossCheck
from distexp.choose.mean_metrics import to_json, values_of
from distexp.choose.ranking import ranked
from distexp.choose.result_texts import (
    command_line,
    describe_margin,
    loss_sentence,
    trade_offs,
    training_overrides,
    winner_sentence,
)
from distexp.choose.search_result import SearchResult
from distexp.choose.settings import Settings
from distexp.choose.state import SearchState
from distexp.choose.table import result_table
from distexp.runs.text import format_override, suggest_command

MOST_TRADE_OFFS = 5


@dataclass
class Outcome:
    """What is known of a search so far.

    Attributes:
        settings: Settings of the search.
        candidates: All candidates.
        result: Result of the search; None before its end.
        winner: The winner, whose losses were checked; None before the end, or if there is none.
        check: Check of the winner's losses.
        rejected: Better candidates whose losses differ, with their checks.
        finished: Whether the losses were checked, too.
    """

    settings: Settings
    candidates: Sequence[Candidate]
    result: SearchResult | None = None
    winner: Candidate | None = None
    check: LossCheck | None = None
    rejected: list[tuple[Candidate, LossCheck]] = field(default_factory=list)
    finished: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the document, without the costs and trials that the state of the search adds."""
        return {
            "winner": self._winner_json(),
            "sentence": self.sentence,
            "statement": self.statement,
            "finished": self.finished,
            "objective": str(self.settings.objective),
            "losses": self.check.to_json() if self.check else None,
            "rejected": [{"overrides": typed_overrides(each), **check.to_json()} for each, check in self.rejected],
            "candidates": [candidate_json(each) for each in self.candidates],
        }

    def _winner_json(self) -> dict[str, Any] | None:
        if self.winner is None:
            return None
        values = values_of(self.winner)
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
        second, margin = describe_margin(self.usable, self.winner, self.settings.objective)
        return winner_sentence(self.winner, second, margin)

    @property
    def usable(self) -> list[Candidate]:
        """Return the candidates that were tried, without the families of those whose losses differ."""
        rejected = [each.family for each, _ in self.rejected]
        return [each for each in self.candidates if each.status is Status.TRIED and each.family not in rejected]


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
        "measured": to_json(candidate),
    }


def print_outcome(outcome: Outcome, state: SearchState, folder: Path, console: Console) -> None:
    """Print the table, the winner, and what was given up for what."""

    def line(text: str, style: str = "") -> None:
        console.print(text, style=style, highlight=False, markup=False, emoji=False, soft_wrap=True)

    objective, result = outcome.settings.objective, outcome.result
    line("")
    for part in result_table(outcome.candidates, objective, outcome.winner):
        console.print(part)
    line("")
    if result is not None and result.stopped:
        line(f"{result.stopped}: there may be a better one. For more trials, raise choose.budget_min")
    for candidate, check in outcome.rejected:
        line(f"not chosen: {label(candidate)}: {loss_sentence(check)}", "red")
    if outcome.winner is None:
        line(outcome.statement or "no candidate completed a trial")
    else:
        line(f"best {objective}: {outcome.sentence}", "bold")
        if outcome.check is not None:
            line(loss_sentence(outcome.check))
        for text in list(trade_offs(outcome.usable, outcome.winner))[:MOST_TRADE_OFFS]:
            line(f"or: {text}")
    line(describe_cost(state), "dim")
    line(f"trials: {folder}; to look at them: {suggest_command('report', folder)}", "dim")
    if outcome.winner is not None:
        line("\nto train with it:")
        line(f"  {command_line(outcome.settings.command, outcome.winner)}")


def describe_cost(state: SearchState) -> str:
    """Return the cost of the trials, with the part that was start-up."""
    total, startup = state.gpu_seconds, state.startup_gpu_seconds
    return f"cost of {len(state.trials)} trials: {total:,.0f} GPU-seconds, of which {startup:,.0f} for starting them"


def best_completed(outcome: Outcome) -> list[Candidate]:
    """Return the candidates to take as the winner, the best first."""
    found = ranked([each for each in outcome.candidates if each.status is Status.TRIED], outcome.settings.objective)
    first = None if outcome.result is None else outcome.result.winner
    return [*([first] if first is not None else []), *(each for each in found if each is not first)]

"""What is printed at the end of a search: the table, the winner, and what was given up for what."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from rich.console import Console

from distexp.choose.candidate import Candidate, Objective
from distexp.choose.equal_candidates import simplest
from distexp.choose.labels import format_worker_time, label
from distexp.choose.outcome import Outcome
from distexp.choose.result_texts import (
    command_line,
    equals_sentence,
    faster_reference,
    loss_sentence,
    may_add_single,
    other_sizes_hint,
)
from distexp.choose.state import SearchState
from distexp.choose.table import result_table
from distexp.choose.trade_offs import trade_offs
from distexp.console.plain_text import print_plain
from distexp.runs.command_text import suggest_command
from distexp.runs.listing import format_count

MAX_TRADE_OFFS = 5


def print_outcome(outcome: Outcome, state: SearchState, folder: Path, console: Console) -> None:
    """Print the table, the winner, and what was given up for what."""
    line = partial(print_plain, console)

    objective, result = outcome.settings.objective, outcome.result
    line("")
    for part in result_table(outcome.candidates, objective, outcome.winner, outcome.equal):
        console.print(part)
    line("")
    if result is not None and result.stopped:
        line(f"{result.stopped}: there may be a better one. For more trials, raise choose.budget_min")
    for rejection in outcome.rejected:
        line(f"not chosen: {label(rejection.candidate)}: {loss_sentence(rejection.check)}", "red")
    if outcome.winner is None:
        line(outcome.statement or "no candidate completed a trial")
    else:
        line(f"best {objective}: {outcome.sentence}", "bold")
        if outcome.equal:
            line(equals_sentence(outcome.winner, outcome.equal))
        if outcome.check is not None:
            line(loss_sentence(outcome.check))
        for text in list(trade_offs(outcome.usable, outcome.winner))[:MAX_TRADE_OFFS]:
            line(f"or: {text}")
        is_for_speed = objective is Objective.THROUGHPUT and may_add_single(outcome.settings)
        faster = is_for_speed and faster_reference(outcome.check, outcome.winner, outcome.candidates)
        if hint := faster or other_sizes_hint(outcome.candidates, outcome.settings):
            line(hint)
    line(describe_cost(state, outcome.candidates), "dim")
    if state.trials:
        line(f"trials: {folder}; to look at them: {suggest_command('report', folder)}", "dim")
    if outcome.winner is not None:
        line("\nto train with it:")
        line(f"  {command_line(outcome.settings.command, outcome.winner)}")
        simple = simplest([outcome.winner, *outcome.equal])
        if simple is not outcome.winner:
            line("\nor with the simplest of the equal configurations:")
            line(f"  {command_line(outcome.settings.command, simple)}")


def describe_cost(state: SearchState, candidates: Iterable[Candidate]) -> str:
    """Return the cost of all trials, with the part that was start-up, and that of the check of the losses."""
    total, startup = state.gpu_seconds, state.startup_gpu_seconds
    trials = format_count(len(state.trials), "trial")
    cost = f"cost of {trials}: {format_worker_time(total, candidates)}, of which {startup:,.0f} for starting them"
    checks = sum(trial.compares_losses for trial in state.trials)
    if not checks:
        return cost
    return f"{cost}, and {state.check_gpu_seconds:,.0f} for {format_count(checks, 'trial')} that compared the losses"

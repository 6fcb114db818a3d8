"""Output of ``choose.dry_run=true``: the candidates, what is left out and why, and the first trials with their cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

from rich.console import Console

from distexp.choose.candidate import Status
from distexp.choose.labels import format_worker_time
from distexp.choose.no_winner import describe_no_winner
from distexp.choose.outcome import Outcome, candidate_json, typed_overrides
from distexp.choose.result_texts import other_sizes_hint
from distexp.choose.search import first_trials
from distexp.choose.search_result import PlannedTrial
from distexp.choose.table import PLAN_LEGEND, others_table, planned_table
from distexp.choose.trial_budget import STARTUP_S
from distexp.choose.trial_overrides import EXCLUDED_STEPS
from distexp.console.plain_text import print_plain
from distexp.exceptions import SweepFailedError
from distexp.runs.json_files import nan_to_none
from distexp.runs.listing import format_count


def print_plan(outcome: Outcome, console: Console) -> None:
    """Print what a search would do.

    Raises:
        SweepFailedError: nothing would be tried.
    """
    waiting = [candidate for candidate in outcome.candidates if candidate.status is Status.WAITING]
    planned = first_trials(outcome.candidates, outcome.settings.objective)
    costs = [trial_cost(candidate) for candidate in planned]
    budget = outcome.settings.budget_gpu_s(max((candidate.workers for candidate in waiting), default=1))
    if outcome.settings.as_json:
        print(json.dumps(nan_to_none(plan_json(outcome, planned, costs, budget)), indent=2))
    else:
        _print_tables(outcome, planned, costs, budget, console)
    if not waiting:
        raise SweepFailedError


def trial_cost(planned: PlannedTrial) -> float:
    """Return the forecast cost of a trial in GPU-seconds."""
    steps, candidate = planned.steps + EXCLUDED_STEPS, planned.candidate
    return candidate.workers * (STARTUP_S + steps * (candidate.forecast_s or 0.0))


def plan_json(
    outcome: Outcome, planned: Sequence[PlannedTrial], costs: Sequence[float], budget: float
) -> dict[str, object]:
    """Return the plan for programs, in the format of a result without a winner."""
    return {
        "winner": None,
        "dry_run": True,
        "objective": str(outcome.settings.objective),
        "candidates": [candidate_json(candidate) for candidate in outcome.candidates],
        "planned": [
            {"overrides": typed_overrides(candidate.candidate), "steps": candidate.steps, "gpu_seconds": round(cost, 1)}
            for candidate, cost in zip(planned, costs, strict=True)
        ],
        "planned_gpu_seconds": round(sum(costs), 1),
        "budget_gpu_seconds": budget,
        "gpu_seconds": 0.0,
    }


def _print_tables(
    outcome: Outcome, planned: Sequence[PlannedTrial], costs: Sequence[float], budget: float, console: Console
) -> None:
    line = partial(print_plain, console)

    waiting = [candidate for candidate in outcome.candidates if candidate.status is Status.WAITING]
    left_out = [candidate for candidate in outcome.candidates if candidate.status is not Status.WAITING]
    line(f"{format_count(len(outcome.candidates), 'configuration')}, of which {len(waiting)} may be tried")
    if planned:
        console.print(planned_table(planned, costs))
        line(PLAN_LEGEND)
    for part in others_table(left_out):
        console.print(part)
    if not waiting:
        line(describe_no_winner(outcome.candidates))
        return
    budget_min = outcome.settings.section.budget_min
    varies = len({candidate.micro_batch for candidate in waiting}) > 1
    sizes = "tries other micro-batches of the best ones, and " if varies else ""
    cost, limit = (format_worker_time(seconds, waiting) for seconds in (sum(costs), budget))
    line(
        f"""
The search would start with these trials: one micro-batch of each strategy and its settings. It skips those that
cannot win any more. All of them cost {cost}, with {STARTUP_S:.0f} s for each start-up.
It also {sizes}repeats the best configurations with more steps.
It ends at {limit} (choose.budget_min={budget_min:g} on all workers). A part of this time is left for
the trials that compare the losses. Nothing was started."""
    )
    if hint := other_sizes_hint(outcome.candidates, outcome.settings):
        line(hint)

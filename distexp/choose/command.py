"""The search of ``distexp choose``: candidates, trials, the check of the losses, and the output."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from distexp.choose.axes import read_axes
from distexp.choose.candidate import Candidate, Status
from distexp.choose.check_cost import check_gpu_seconds
from distexp.choose.dry_run import print_plan
from distexp.choose.labels import format_worker_minutes, label
from distexp.choose.loss_check import LossChecker
from distexp.choose.mean_metrics import mean_metrics
from distexp.choose.outcome import Outcome, Rejected
from distexp.choose.print_outcome import print_outcome
from distexp.choose.pruning import prune_by_plan
from distexp.choose.ranking import by_score, ranked
from distexp.choose.result_texts import describe_values
from distexp.choose.rough_forecast import set_forecasts
from distexp.choose.search import search
from distexp.choose.search_notes import search_notes
from distexp.choose.search_result import PlannedTrial
from distexp.choose.search_rules import rules_for
from distexp.choose.settings import Settings, read_settings
from distexp.choose.single_reference import fitting_singles
from distexp.choose.space import make_space
from distexp.choose.state import SearchState
from distexp.choose.trial_budget import expected_gpu_seconds
from distexp.choose.trial_outcome import add_trial
from distexp.choose.trials import Trials
from distexp.exceptions import InterruptedRunError, MonitoringInterrupted, SweepFailedError, SweepInterrupted
from distexp.launch.cell import Cell, MakeCell
from distexp.launch.launcher import TrialLauncher
from distexp.launch.sweep_dir import locked_sweep_dir
from distexp.plan.planner import Planner, parallel_processes
from distexp.runs.command_text import suggest_command
from distexp.runs.json_files import nan_to_none
from distexp.runs.listing import format_count

MAX_CHECKED = 3
"""Most candidates whose losses are checked before the search ends without a winner."""


def run_choose(
    cells: Sequence[Cell], master: DictConfig, make: MakeCell, launcher: TrialLauncher, planner: Planner | None = None
) -> None:
    """Search for the best configuration of a command, and print it.

    Args:
        cells: The cells of the command; there must be one.
        master: Configuration of the command, with the hydra node.
        make: Composes a cell.
        launcher: Runs the trials.
        planner: Source of estimates.

    Raises:
        ConfigError: the command is no search.
        SweepFailedError: there is no winner.
    """
    settings = read_settings(cells, master)
    console = Console(stderr=settings.as_json)
    for note in (*settings.notes, *search_notes(make, settings)):
        print(f"distexp: {note}", file=sys.stderr)
    with planner or Planner() as source:
        candidates = find_candidates(settings, make, source)
        singles = fitting_singles(candidates, settings.command, make, source)
    set_forecasts(singles)
    outcome = Outcome(settings, candidates)
    if settings.section.dry_run:
        print_plan(outcome, console)
        return
    with locked_sweep_dir(master, 1) as found:
        sweep_dir = found.absolute()
        state = SearchState.open(sweep_dir, settings.command)
        state.describe = outcome.to_json
        with launcher.runner(sweep_dir, console) as runner:
            trials = Trials(state, make, runner, settings.section.budget_min)
            try:
                _search(outcome, trials, singles)
            except (InterruptedRunError, MonitoringInterrupted, SweepInterrupted, KeyboardInterrupt):
                _print_interrupted(sweep_dir, state, outcome)
                raise
        outcome.finished = True
        state.write()
    _finish(outcome, state, sweep_dir, console)


def find_candidates(settings: Settings, make: MakeCell, planner: Planner) -> list[Candidate]:
    """Return all candidates with their predictions and forecasts. Those that do not fit are pruned."""
    command = settings.command
    candidates = make_space(make, command, settings.section.gpus, read_axes(settings.section.space, command))
    _announce(candidates, settings)
    prune_by_plan(
        candidates,
        planner.estimate,
        settings.objective,
        at_a_time=parallel_processes(),
        report=lambda text: print(f"distexp: {text}", file=sys.stderr),
    )
    set_forecasts(candidates)
    return candidates


def _announce(candidates: Sequence[Candidate], settings: Settings) -> None:
    """Print how many configurations may be predicted, and how long the trials may take."""
    waiting = [candidate for candidate in candidates if candidate.status is Status.WAITING]
    if not waiting:
        return
    text = f"predicting the memory of up to {format_count(len(waiting), 'configuration')}"
    if not settings.section.dry_run:
        most, minutes = max(candidate.workers for candidate in waiting), settings.section.budget_min
        text += (
            f", which can take minutes. The budget of the trials is {format_worker_minutes(minutes * most, waiting)} "
            f"(choose.budget_min={minutes:g} x {format_count(most, 'worker')})"
        )
    print(f"distexp: {text}", file=sys.stderr)


def _search(outcome: Outcome, trials: Trials, singles: Sequence[Candidate]) -> None:
    """Search, and check the losses of the winner. One with other losses is followed by the next best."""
    settings = outcome.settings
    waiting = [candidate for candidate in outcome.candidates if candidate.status is Status.WAITING]
    most = max((candidate.workers for candidate in waiting), default=1)
    objective, budget = settings.objective, settings.budget_gpu_s(most)
    reserved = partial(check_gpu_seconds, outcome.candidates, singles, objective)
    in_queue = any(candidate.queues for candidate in waiting)
    rules = rules_for(on_cpus=any(candidate.on_cpus for candidate in waiting), on_slurm=in_queue)
    outcome.result = search(outcome.candidates, trials.try_all, objective, budget, rules, reserved_gpu_s=reserved)
    checker = LossChecker(outcome.candidates, trials, singles)
    for candidate in ranked(outcome.candidates, settings.objective)[:MAX_CHECKED]:
        check = checker.check(candidate)
        if check.equal is not False:
            outcome.winner, outcome.check = candidate, check
            # Not state.gpu_seconds: in a resumed search it has the repeats that this call decides on.
            used = outcome.result.gpu_seconds + trials.state.check_gpu_seconds
            _prefer_reference(outcome, trials, budget - used)
            return
        outcome.rejected.append(Rejected(candidate, check))


def _prefer_reference(outcome: Outcome, trials: Trials, left_gpu_s: float) -> None:
    """Take the reference of the losses as the winner, if it is a candidate whose trials are better.

    The search may have left it out because of its forecast. So it is repeated as often as the winner, if what is left
    of the budget allows it.
    """
    winner, check, objective = outcome.winner, outcome.check, outcome.settings.objective
    rejected = [rejection.candidate for rejection in outcome.rejected]
    best = next(candidate for candidate in by_score(outcome.candidates, objective) if candidate not in rejected)
    if winner is None or check is None or not check.equal or label(best) != check.reference:
        return
    missing = [PlannedTrial(best, trial.steps) for trial in winner.completed[len(best.completed) :]]
    if sum(expected_gpu_seconds(planned, outcome.candidates) for planned in missing) > left_gpu_s:
        missing = []
    for trial in trials.try_all(missing):
        add_trial(best, trial, [best], objective)
    if ranked([winner, best], objective)[0] is best:
        outcome.winner, outcome.check = best, check.of_reference(winner)


def _print_interrupted(sweep_dir: Path, state: SearchState, outcome: Outcome) -> None:
    """Print the best configuration so far, and how to continue."""
    done = sum(trial.status is not None for trial in state.trials)
    for best in ranked(outcome.usable, outcome.settings.objective)[:1]:
        print(f"distexp: best so far: {label(best)}: {describe_values(mean_metrics(best))}", file=sys.stderr)
    kept = " They are kept." if done else ""
    print(
        f"distexp: the search was interrupted after {format_count(done, 'trial')}.{kept} To continue: "
        f"{suggest_command('resume', sweep_dir)}",
        file=sys.stderr,
    )


def _finish(outcome: Outcome, state: SearchState, sweep_dir: Path, console: Console) -> None:
    """Print the result.

    Raises:
        SweepFailedError: there is no winner.
    """
    if outcome.settings.as_json:
        print(json.dumps(nan_to_none(state.to_json()), indent=2))
    else:
        print_outcome(outcome, state, sweep_dir, console)
    if outcome.winner is None:
        raise SweepFailedError

"""The search of ``distexp choose``: candidates, trials, the check of the losses, and the output."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from distexp.choose import axes, loss_check, policy, space
from distexp.choose import result_texts as texts
from distexp.choose import search_output as output
from distexp.choose.candidate import Candidate, Objective, format_worker_minutes, format_worker_time, label, rules_for
from distexp.choose.predictions import pruning, rough_forecast
from distexp.choose.ranking import PlannedTrial, by_score, mean_metrics, ranked
from distexp.choose.search import describe_no_winner, first_trials, search
from distexp.choose.trials import EXCLUDED_STEPS, SearchState, Trials, add_trial
from distexp.compose.composition import Cell, MakeCell
from distexp.config import ConfigError
from distexp.config.overrides import format_count, key_of, suggest_command
from distexp.console.screen import RunConsole
from distexp.exceptions import InterruptedRunError, MonitoringInterrupted, SweepFailedError, SweepInterrupted
from distexp.launch.launcher import TrialLauncher
from distexp.launch.run_dirs import locked_sweep_dir
from distexp.plan.planner import Planner, parallel_processes
from distexp.plan.verdict import FITS, memory_to_fit_mib
from distexp.resolve.resources import launcher_traits
from distexp.strategies.parallel.checks import CONTEXT, TENSOR
from distexp.system import cgroups, files
from distexp.system.silence import set_step
from distexp.tables.columns import print_plain

MAX_CHECKED = 3  # most candidates whose losses are checked before the search ends without a winner


def run_choose(
    cells: Sequence[Cell], master: DictConfig, make: MakeCell, launcher: TrialLauncher, planner: Planner | None = None
) -> None:
    """Search for the best configuration of a command, and print it. Raise SweepFailedError if there is no winner."""
    settings = space.read_settings(cells, master)
    console = Console(stderr=settings.as_json)
    for note in (*settings.notes, *search_notes(make, settings)):
        print(f"distexp: {note}", file=sys.stderr)
    with planner or Planner() as source:
        candidates = find_candidates(settings, make, source)
        singles = loss_check.fitting_singles(candidates, settings.command, make, source)
    rough_forecast.set_forecasts(singles)
    outcome = output.Outcome(settings, candidates)
    if settings.section.dry_run:
        print_plan(outcome, console)
        return
    with locked_sweep_dir(master, 1) as found:
        sweep_dir = found.absolute()
        state = SearchState.open(sweep_dir, settings.command)
        state.describe = outcome.to_json
        with launcher.runner(sweep_dir, RunConsole(stderr=settings.as_json)) as runner:
            trials = Trials(state, make, runner, settings.section.budget_min)
            try:
                _search(outcome, trials, singles)
            except (InterruptedRunError, MonitoringInterrupted, SweepInterrupted, KeyboardInterrupt):
                _print_interrupted(sweep_dir, state, outcome)
                raise
        outcome.finished = True
        state.write()
    if settings.as_json:
        print(json.dumps(files.nan_to_none(state.to_json()), indent=2))
    else:
        output.print_outcome(outcome, state, sweep_dir, console)
    if outcome.winner is None:
        raise SweepFailedError


def find_candidates(settings: space.Settings, make: MakeCell, planner: Planner) -> list[Candidate]:
    """Return all candidates with their predictions and forecasts. Those that do not fit are pruned."""
    candidates = _predicted(settings.section.space, settings, make, planner)
    if not any(candidate.is_waiting and not candidate.offloads for candidate in candidates):
        candidates += _find_sharing(candidates, settings, make, planner)
    rough_forecast.set_forecasts(candidates)
    return candidates


def _predicted(entries: Sequence[str], settings: space.Settings, make: MakeCell, planner: Planner) -> list[Candidate]:
    """Return the candidates of some entries of ``choose.space``. Those that do not fit are pruned."""
    command = settings.command
    candidates = space.make_space(make, command, settings.section.gpus, axes.read_axes(entries, command))
    _announce(candidates, settings)
    pruning.prune_by_plan(
        candidates,
        planner.estimate,
        settings.objective,
        at_a_time=parallel_processes(),
        report=lambda text: print(f"distexp: {text}", file=sys.stderr),
    )
    return candidates


SHARED_BY_DEFAULT, MOST_SHARING = (TENSOR, CONTEXT), 8
"""Degrees that are tried if nothing fits without offloading, and the most workers of a group."""


def _find_sharing(
    candidates: Sequence[Candidate], settings: space.Settings, make: MakeCell, planner: Planner
) -> list[Candidate]:
    """Return candidates whose workers share matrices or tokens: those of the smallest degree with which one fits.

    They send activations in each layer, which is slower than a sharding, and faster than offloading. So they are for
    GPUs on which nothing fits without offloading. If one fits, slower candidates that offload are pruned.
    """
    section, command = settings.section, settings.command
    base = space.base_config(make, command)
    if base.cluster.device != "cuda" or any(
        key_of(text).startswith("parallel.") for text in (*command, *section.space)
    ):
        return []
    degree, found = 2, list[Candidate]()
    sizes = {size.workers_per_node for size in axes.cluster_sizes(base, section.gpus)}
    while degree <= MOST_SHARING and any(size % degree == 0 for size in sizes):
        for key in SHARED_BY_DEFAULT:
            with suppress(ConfigError):  # No strategy supports it with this model and data.
                found += _predicted([*section.space, f"{key}={degree}"], settings, make, planner)
        proven = (each for each in found if each.is_waiting and each.predicted is not None)
        fitting = next((each for each in proven if each.predicted and each.predicted.verdict == FITS), None)
        if fitting is not None:
            is_slower = settings.objective is not Objective.MEMORY
            for other in (each for each in candidates if is_slower and each.is_waiting):
                other.prune(f"offloading is slower, and not needed: {' '.join(fitting.overrides)} fits")
            break
        degree *= 2
    return [each for each in found if each.config is not None]


def _announce(candidates: Sequence[Candidate], settings: space.Settings) -> None:
    waiting = [candidate for candidate in candidates if candidate.is_waiting]
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
    set_step("predicting memory")


def _search(outcome: output.Outcome, trials: Trials, singles: Sequence[Candidate]) -> None:
    """Search, and check the losses of the winner. One with other losses is followed by the next best."""
    settings = outcome.settings
    waiting = [candidate for candidate in outcome.candidates if candidate.is_waiting]
    most = max((candidate.workers for candidate in waiting), default=1)
    objective, budget = settings.objective, settings.budget_gpu_s(most)
    reserved = partial(loss_check.check_gpu_seconds, outcome.candidates, singles, objective)
    in_queue = any(candidate.queues for candidate in waiting)
    rules = rules_for(on_cpus=any(candidate.on_cpus for candidate in waiting), on_slurm=in_queue)
    outcome.result = search(outcome.candidates, trials.try_all, objective, budget, rules, reserved_gpu_s=reserved)
    checker = loss_check.LossChecker(outcome.candidates, trials, singles)
    for candidate in ranked(outcome.candidates, settings.objective)[:MAX_CHECKED]:
        check = checker.check(candidate)
        if check.equal is not False:
            outcome.winner, outcome.check = candidate, check
            # Not state.gpu_seconds: in a resumed search it has the repeats that this call decides on.
            used = outcome.result.gpu_seconds + trials.state.check_gpu_seconds
            _prefer_reference(outcome, trials, budget - used)
            return
        outcome.rejected.append((candidate, check))


def _prefer_reference(outcome: output.Outcome, trials: Trials, left_gpu_s: float) -> None:
    """Take the reference of the losses as the winner, if it is a candidate whose trials are better.

    The search may have left it out because of its forecast. So it is repeated as often as the winner, if what is left
    of the budget allows it.
    """
    winner, check, objective = outcome.winner, outcome.check, outcome.settings.objective
    rejected = [candidate for candidate, _ in outcome.rejected]
    best = next(candidate for candidate in by_score(outcome.candidates, objective) if candidate not in rejected)
    if winner is None or check is None or not check.equal or label(best) != check.reference:
        return
    missing = [PlannedTrial(best, trial.steps) for trial in winner.completed[len(best.completed) :]]
    if sum(policy.expected_gpu_seconds(planned, outcome.candidates) for planned in missing) > left_gpu_s:
        missing = []
    for trial in trials.try_all(missing):
        add_trial(best, trial, [best], objective)
    if ranked([winner, best], objective)[0] is best:
        outcome.winner, outcome.check = best, replace(check, reference=label(winner), reason="")


def _print_interrupted(sweep_dir: Path, state: SearchState, outcome: output.Outcome) -> None:
    done = sum(trial.status is not None for trial in state.trials)
    for best in ranked(outcome.usable, outcome.settings.objective)[:1]:
        print(f"distexp: best so far: {label(best)}: {texts.describe_values(mean_metrics(best))}", file=sys.stderr)
    kept = {0: "", 1: " It is kept."}.get(done, " They are kept.")
    print(
        f"distexp: the search was interrupted after {format_count(done, 'trial')}.{kept} To continue: "
        f"{suggest_command('resume', sweep_dir)}",
        file=sys.stderr,
    )


def print_plan(outcome: output.Outcome, console: Console) -> None:
    """Print what a search would try, what is left out, and the cost. Raise SweepFailedError if nothing is tried."""
    waiting = [candidate for candidate in outcome.candidates if candidate.is_waiting]
    planned = first_trials(outcome.candidates, outcome.settings.objective)
    costs = [
        trial.candidate.workers
        * (policy.STARTUP_S + (trial.steps + EXCLUDED_STEPS) * (trial.candidate.forecast_s or 0.0))
        for trial in planned
    ]
    budget = outcome.settings.budget_gpu_s(max((candidate.workers for candidate in waiting), default=1))
    if outcome.settings.as_json:
        # The format is that of a result without a winner.
        plan = {
            "winner": None,
            "dry_run": True,
            "objective": str(outcome.settings.objective),
            "candidates": [output.candidate_json(candidate) for candidate in outcome.candidates],
            "planned": [
                {
                    "overrides": output.typed_overrides(trial.candidate),
                    "steps": trial.steps,
                    "gpu_seconds": round(cost, 1),
                }
                for trial, cost in zip(planned, costs, strict=True)
            ],
            "planned_gpu_seconds": round(sum(costs), 1),
            "budget_gpu_seconds": budget,
            "gpu_seconds": 0.0,
        }
        print(json.dumps(files.nan_to_none(plan), indent=2))
    else:
        _print_tables(outcome, planned, costs, budget, console)
    if not waiting:
        raise SweepFailedError


def _print_tables(
    outcome: output.Outcome, planned: Sequence[PlannedTrial], costs: Sequence[float], budget: float, console: Console
) -> None:
    line = partial(print_plain, console)
    waiting = [candidate for candidate in outcome.candidates if candidate.is_waiting]
    left_out = [candidate for candidate in outcome.candidates if not candidate.is_waiting]
    line(f"{format_count(len(outcome.candidates), 'configuration')}, of which {len(waiting)} may be tried")
    if planned:
        console.print(output.planned_table(planned, costs))
        line(output.PLAN_LEGEND)
    for part in output.others_table(left_out):
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
cannot win any more. All of them cost {cost}, with {policy.STARTUP_S:.0f} s for each start-up.
It also {sizes}repeats the best configurations with more steps.
It ends at {limit} (choose.budget_min={budget_min:g} on all workers). A part of this time is left for
the trials that compare the losses. Nothing was started."""
    )
    if hint := texts.other_sizes_hint(outcome.candidates, outcome.settings):
        line(hint)


HOW_TO_NAME_MEMORY = {
    "cuda": "name the GPU, as in plan.gpu=a100-80gb, or its memory, as in plan.gpu_memory_gb=80",
    "cpu": "name that of a node, as in cluster.memory_gb=128",
}
"""What to type if the memory of the machine is unknown, by device."""


def search_notes(make: MakeCell, settings: space.Settings) -> Iterator[str]:
    """Yield the lines about the device, its memory, and the micro-batch."""
    config = space.base_config(make, settings.command)
    device, requested = config.cluster.device, any("cluster.device=" in text for text in settings.command)
    if launcher_traits(config).runs_here and device == "cpu" and not requested and not cgroups.visible_gpus():
        yield "this machine has no GPU that can be used: the trials run on its CPUs"
    if memory_to_fit_mib(config) is None:
        memory = "memory of the GPUs" if device == "cuda" else "memory of the nodes"
        yield (
            f"the {memory} is unknown, so trials may run out of it: {HOW_TO_NAME_MEMORY[device]}. Then configurations "
            "that do not fit are left out"
        )
    kept = space.kept_micro_batch(
        config, settings.section.gpus, axes.read_axes(settings.section.space, settings.command)
    )
    if kept is not None:
        yield (
            f"all configurations have train.micro_batch_size={kept}. A batch norm or a router loss uses the statistics "
            "of a micro-batch, so another size is another training. To vary it too, add train.micro_batch_size=auto"
        )

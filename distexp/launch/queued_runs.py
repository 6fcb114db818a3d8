"""The runs of a queue: their preparation, and their monitoring until all have ended."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from distexp.compose.composition import Cell
from distexp.config.overrides import suggest_command
from distexp.console.screen import Screen
from distexp.console.sweep_table import InvalidCells, Row, describe_state, followed_states, state_key
from distexp.exceptions import MonitoringInterrupted, SweepFailedError
from distexp.launch.run_dirs import AssignedRun, ExistingRunRules, GitState, assign_run_dirs, write_invalid
from distexp.runs import attempts, texts
from distexp.runs.record import DONE, FAILURES, ExistingRun, RunRecord, RunSpec, read_records
from distexp.runs.run_dir import HYDRA
from distexp.runs.run_state import RunState
from distexp.tables.columns import live_display, print_plain, show_progress


@dataclass(frozen=True)
class PreparedRun:
    """A run with its directory, ready to be submitted."""

    spec: RunSpec
    directory: Path


def prepare_runs(
    cells: Sequence[Cell],
    sweep_dir: Path,
    code: GitState,
    console: Console,
    *,
    active: Collection[int],
    resume: bool,
    snapshot: str | None = None,
) -> Iterator[PreparedRun]:
    """Give each cell its directory, and write the spec of its run, or the record if it is invalid. Skip active runs."""

    def should_skip(run: ExistingRun) -> bool:
        skipped = run.number in active or run.status in DONE
        if skipped:
            print_plain(console, f"run {run.number}: already {'submitted' if run.number in active else run.status}")
        return skipped

    rules = ExistingRunRules(should_skip, warn=partial(print_plain, console), active=active)
    runs = assign_run_dirs(cells, sweep_dir, code, rules, resume=resume, snapshot=snapshot)
    invalid = InvalidPrinter(cells, console)
    with show_progress("preparing", len(cells)) as advance:
        for run in runs:
            prepared = prepare_run(run)
            advance()
            if isinstance(prepared, RunRecord):
                invalid.print(run.info.number, texts.failure_text(prepared))
            else:
                yield prepared


def prepare_run(run: AssignedRun) -> PreparedRun | RunRecord:
    """Write the spec of a run and return what to submit; for an invalid run write its record and return that."""
    write_hydra_files(run.composed, run.directory)
    if run.cell.config is None:
        return write_invalid(run)
    run.info.attempts = attempts.read_attempts(run.directory)
    attempts.archive_previous(run.directory)
    spec = RunSpec(run.cell.config, run.info)
    spec.write(run.directory)
    run.cell.write_prediction(run.directory)
    return PreparedRun(spec, run.directory)


def write_hydra_files(composed: DictConfig, directory: Path) -> None:
    """Write ``.hydra/`` with the files that Hydra itself writes."""
    folder = directory / HYDRA
    folder.mkdir(parents=True, exist_ok=True)
    content = OmegaConf.to_container(composed, enum_to_str=True)
    assert isinstance(content, dict)
    hydra = content.pop("hydra")
    parts = {"overrides": hydra["overrides"]["task"], "hydra": {"hydra": hydra}, "config": content}
    for name, part in parts.items():
        # The same YAML as OmegaConf.save writes, ten times as fast: a sweep may have hundreds of runs.
        (folder / f"{name}.yaml").write_text(yaml.dump(part, Dumper=yaml.CSafeDumper, sort_keys=False))


class InvalidPrinter:
    """Printer of why cells are invalid: one line for all cells with the same reason."""

    def __init__(self, cells: Sequence[Cell], console: Console, prefix: str = "") -> None:
        self._reasons = InvalidCells(texts.join_errors(cell.errors) for cell in cells if cell.config is None)
        self._console, self._prefix = console, prefix

    def print(self, number: int, reason: str) -> None:
        """Print why a run is invalid, unless the reason was printed before."""
        if label := self._reasons.label(number, reason):
            print_plain(self._console, f"{self._prefix}{label}: invalid: {reason}")


FAST_POLLING_S, FAST_POLL_S, SLOW_POLL_S = 120.0, 2.0, 10.0
"""The queue is polled every 2 s for two minutes, then every 10 s, to limit the load on the controller."""


def follow(poll: Callable[[], Sequence[RunState]], total: int, sweep_dir: Path, console: Console) -> None:
    """Show every run until the last has ended. Raise SweepFailedError if a run failed.

    On Ctrl-C, print the finished runs and a hint, and raise MonitoringInterrupted. The jobs continue.
    """
    try:
        poll_until_done(poll, console, {})
    except KeyboardInterrupt:
        screen = Screen(total=total, sweep_dir=sweep_dir)
        screen.records.extend(read_records(sweep_dir).records)
        screen.show_comparison()
        print_plain(
            console,
            f"\nThe jobs continue. To follow them: {suggest_command('status', sweep_dir)} --watch\n"
            f"To cancel them:               {suggest_command('cancel', sweep_dir)}",
        )
        raise MonitoringInterrupted from None
    print_summary(sweep_dir)


def poll_until_done(poll: Callable[[], Sequence[RunState]], console: Console, printed: dict[int, str]) -> None:
    """Show the runs of a sweep until all have ended. ``printed`` gets the key of each run's last printed state."""
    started = time.monotonic()
    with live_display(console) as show:
        while True:
            runs = poll()
            if show is None:
                print_changes(runs, printed, console)
            if not any(run.is_active for run in runs):
                return
            waited_s = time.monotonic() - started
            for _ in range(round(FAST_POLL_S if waited_s < FAST_POLLING_S else SLOW_POLL_S)):
                if show is not None:
                    show(followed_states([Row(run) for run in runs], console.width, time.monotonic() - started))
                time.sleep(1.0)


def print_changes(runs: Sequence[RunState], printed: dict[int, str], console: Console) -> None:
    """Print one line for each run whose state has changed."""
    for run in runs:
        key = state_key(run)
        if printed.get(run.number) != key:
            printed[run.number] = key
            job = f" (job {run.job})" if run.job else ""
            print_plain(console, f"run {run.number}{job}: {describe_state(run)}")


def print_summary(sweep_dir: Path) -> None:
    """Print the panel of a single run, or the table of several. Raise SweepFailedError if a run failed."""
    found = read_records(sweep_dir)
    screen = Screen(total=len(found.stored), sweep_dir=sweep_dir)
    if len(found.stored) == 1:
        screen.show_result(found.stored[0].record, found.stored[0].path.parent)
    else:
        screen.records.extend(found.records)
    screen.show_comparison()
    if any(record.status in FAILURES for record in found.records):
        raise SweepFailedError

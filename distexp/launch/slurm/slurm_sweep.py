"""Start of runs on Slurm: prepare their directories, submit and follow them, also those of a search."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from distexp.compose.cells import Cell
from distexp.config import Config, ConfigError
from distexp.config.overrides import format_count, format_override, format_runs, suggest_command
from distexp.exceptions import MonitoringInterrupted, SweepInterrupted
from distexp.launch import ledger
from distexp.launch.launcher import CancelError, Cancelled, Sweep, TrialLauncher, TrialRunner
from distexp.launch.queued_runs import InvalidPrinter, PreparedRun, poll_until_done, prepare_run, prepare_runs
from distexp.launch.run_dirs import AssignedRun, locked_sweep_dir
from distexp.launch.slurm import client
from distexp.launch.slurm.script import JobArray
from distexp.launch.slurm.status import poll
from distexp.launch.slurm.submission import group_by_resources, submit_runs
from distexp.launch.snapshot import take_snapshot
from distexp.resolve.section_checks import find_missing_data
from distexp.runs.run_dir import SNAPSHOT
from distexp.runs.texts import join_errors
from distexp.tables.columns import print_plain

NOT_CONFIGURED = "configuration source"
"""Part of the error message of Slurm's commands if Slurm is installed but not configured."""


def max_array_size() -> int:
    """Return Slurm's MaxArraySize.

    Raises:
        ConfigError: If this machine has no configured Slurm.
        OSError: If Slurm does not answer.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "cluster=slurm needs sbatch, which is not on this machine's PATH: log in to the cluster, or print the "
            "sbatch files with cluster.dry_run=true"
        )
    try:
        return client.max_array_size()
    except client.SlurmError as error:
        if NOT_CONFIGURED in str(error):
            raise ConfigError(
                f"cluster=slurm: Slurm is not configured on this machine ({error}): log in to a node of the cluster, "
                "or use cluster=local; distexp doctor shows details"
            ) from None
        raise OSError(f"Slurm does not answer ({error}); nothing was submitted: try again later") from None


def start_sweep(sweep: Sweep, follow: Callable[[Path, Console], None]) -> None:
    """Submit the runs of a sweep, and follow them unless ``cluster.wait=false``."""
    console = Console()
    sweep_dir = _submit_sweep(sweep, max_array_size(), console)
    print_plain(console, f"sweep: {sweep_dir}")
    if sweep.cells[0].composed.cluster.wait:
        follow(sweep_dir, console)
    else:
        print_plain(console, f"status: {suggest_command('status', sweep_dir)}")


def _submit_sweep(sweep: Sweep, array_size: int, console: Console) -> Path:
    """Prepare and submit the runs of a sweep; return its directory."""
    cells, resume = sweep.cells, sweep.master.sweep.resume
    with locked_sweep_dir(sweep.master, len(cells)) as claimed:
        sweep_dir = claimed.absolute()
        try:
            snapshot = take_snapshot(sweep_dir, trusted_packages(cells), partial(print_plain, console))
            active = _active_runs(sweep_dir) if resume else set()
            runs = prepare_runs(
                cells, sweep_dir, snapshot.git, console, active=active, resume=resume, snapshot=snapshot.folder.name
            )
            prepared = list(runs)
        except KeyboardInterrupt:
            hint = suggest_command("resume", sweep_dir)
            raise SweepInterrupted(f"interrupted: nothing was submitted; to submit the runs: {hint}") from None
        submit_runs(prepared, sweep_dir, snapshot.folder, array_size, console)
    return sweep_dir


def _active_runs(sweep_dir: Path) -> set[int]:
    return {run.number for run in poll(sweep_dir) if run.is_active}


def trusted_packages(cells: Sequence[Cell]) -> list[str]:
    """Return the packages to copy with the code."""
    return list(cells[0].composed.trusted_packages)


@dataclass(frozen=True)
class SlurmTrials(TrialLauncher):
    """Launcher of trials on Slurm."""

    max_array_size: int  # Jobs in the largest array that Slurm accepts.
    trusted: Sequence[str]  # Packages to copy with the code.

    @contextmanager
    def runner(self, sweep_dir: Path, console: Console) -> Iterator[TrialRunner]:
        """Yield the runner of trials, after the code was copied."""
        snapshot = take_snapshot(sweep_dir, list(self.trusted), partial(print_plain, console))
        # Last printed state of each trial, so that a later batch does not print it again.
        printed: dict[int, str] = {}

        def run_all(runs: Sequence[AssignedRun], after_each: Callable[[], None]) -> None:
            """Submit the trials of a batch that have no job yet, and wait until all have ended."""
            active = _active_runs(sweep_dir)
            outcomes = [prepare_run(run) for run in runs if run.info.number not in active]
            prepared = [outcome for outcome in outcomes if isinstance(outcome, PreparedRun)]
            submit_runs(prepared, sweep_dir, snapshot.folder, self.max_array_size, console)
            try:
                poll_until_done(partial(poll, sweep_dir, {}), console, printed)
            except KeyboardInterrupt:
                cancel = suggest_command("cancel", sweep_dir)
                print_plain(console, f"the submitted trials continue; to cancel them: {cancel}")
                raise MonitoringInterrupted from None
            after_each()

        yield TrialRunner(run_all, snapshot.git, snapshot.folder.name)


# Output of ``cluster.dry_run=true``: the sbatch files of a sweep. Nothing is written or submitted.

MAX_LISTED_RUNS = 20
"""Runs of an array whose overrides are printed."""


@dataclass(frozen=True)
class PlannedRun:
    """A valid cell, with the number that its run would have in a new sweep."""

    number: int
    config: Config
    overrides: str  # as they are typed; of several cells only those that they do not share


def print_scripts(cells: Sequence[Cell], sweep_dir: Path, console: Console) -> None:
    """Print the sbatch files of a sweep."""
    runs, invalid = list[PlannedRun](), InvalidPrinter(cells, console, prefix="# ")
    for number, cell in enumerate(cells):
        if cell.config is None:
            invalid.print(number, join_errors(cell.errors))
        else:
            overrides = " ".join(map(format_override, cell.varied or cell.overrides))
            runs.append(PlannedRun(number, cell.config, overrides))
    for index, group in enumerate(group_by_resources(runs, lambda run: run.config)):
        numbers = [run.number for run in group]
        directories = tuple(map(str, numbers))
        array = JobArray(f"array{index}", group[0].config, sweep_dir, sweep_dir / SNAPSHOT, directories)
        print_plain(console, f"# {format_runs(numbers)}")
        for run in group[:MAX_LISTED_RUNS]:
            print_plain(console, f"#   {run.number}: {run.overrides or 'no overrides'}")
        if len(group) > MAX_LISTED_RUNS:
            print_plain(console, f"#   and {len(group) - MAX_LISTED_RUNS} more")
        print_plain(console, array.render())
    for missing in dict.fromkeys(error for run in runs for error in find_missing_data(run.config)):
        print_plain(console, f"# note: not found on this machine, and checked at submission: {missing}")
    jobs = format_count(len(runs), "job")
    print_plain(
        console, f"# {jobs}, nothing was submitted. The folder of the sweep and its files are made at submission."
    )


# Cancellation of the jobs of a sweep.

TIMEOUT_S, POLL_S = 60.0, 0.5
"""Slurm's KillWait is 30 s by default, so jobs may need that long to end."""


def cancel_jobs(sweep_dir: Path) -> Cancelled:
    """Cancel the jobs of a sweep, and wait for their end.

    Raises:
        CancelError: Slurm refused, or does not answer.
    """
    entries = ledger.latest(sweep_dir)
    active = [run for run in poll(sweep_dir) if run.is_active]
    try:
        client.cancel([run.job for run in active if run.job])
    except client.SlurmError as error:
        raise CancelError(f"no job was cancelled: {error}") from None
    cancelled = [entries[run.number] for run in active]
    ledger.append(sweep_dir, [ledger.Entry(e.run, e.id, e.directory, e.job, "cancelled") for e in cancelled])
    hint = suggest_command("status", sweep_dir)
    left = [
        f"run {number} (job {entries[number].job}) is still ending: check again with {hint}"
        for number in _wait_for_end(sweep_dir)
    ]
    return Cancelled(len(active), left)


def _wait_for_end(sweep_dir: Path) -> list[int]:
    """Wait for the end of all jobs, at most TIMEOUT_S; return the runs that are left.

    Polling also writes the records of the cancelled runs.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        left = [run.number for run in poll(sweep_dir) if run.is_active]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(POLL_S)

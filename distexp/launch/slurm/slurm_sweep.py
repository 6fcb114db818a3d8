"""Start of runs on Slurm: prepare their directories, submit and follow them, also those of a search."""

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from distexp.compose.composition import Cell
from distexp.config import Config, ConfigError
from distexp.config.overrides import format_count, format_override, format_runs, suggest_command
from distexp.exceptions import MonitoringInterrupted, SweepInterrupted
from distexp.launch import outcome, run_dirs
from distexp.launch.launcher import CancelError, Cancelled, Sweep, TrialLauncher, TrialRunner
from distexp.launch.queued_runs import InvalidPrinter, PreparedRun, poll_until_done, prepare_run, prepare_runs
from distexp.launch.run_dirs import AssignedRun, locked_sweep_dir
from distexp.launch.slurm import client, status
from distexp.launch.slurm.script import JobArray, resource_key
from distexp.launch.snapshot import take_snapshot
from distexp.resolve.section_checks import find_missing_data
from distexp.runs.attempts import SUBMISSION_REFUSED
from distexp.runs.record_sections import RunError
from distexp.runs.run_dir import SLURM, SNAPSHOT
from distexp.runs.texts import join_errors
from distexp.system import files, processes
from distexp.tables.columns import print_plain

NOT_CONFIGURED = "configuration source"
"""Part of the error message of Slurm's commands if Slurm is installed but not configured."""


def max_array_size() -> int:
    """Return Slurm's MaxArraySize. Raise ConfigError without a configured Slurm, or OSError if it does not answer."""
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
    cells, resume = sweep.cells, sweep.master.sweep.resume
    with locked_sweep_dir(sweep.master, len(cells)) as claimed:
        sweep_dir = claimed.absolute()
        try:
            snapshot = take_snapshot(sweep_dir, trusted_packages(cells), partial(print_plain, console))
            active = _active_runs(sweep_dir) if resume else []
            runs = prepare_runs(
                cells, sweep_dir, snapshot.git, console, active=active, resume=resume, snapshot=snapshot.folder.name
            )
            prepared = list(runs)
        except KeyboardInterrupt:
            hint = suggest_command("resume", sweep_dir)
            raise SweepInterrupted(f"interrupted: nothing was submitted; to submit the runs: {hint}") from None
        submit_runs(prepared, sweep_dir, snapshot.folder, array_size, console)
    return sweep_dir


def _active_runs(sweep_dir: Path) -> list[int]:
    return [run.number for run in status.poll(sweep_dir) if run.is_active]


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
                poll_until_done(partial(status.poll, sweep_dir, {}), console, printed)
            except KeyboardInterrupt:
                cancel = suggest_command("cancel", sweep_dir)
                print_plain(console, f"the submitted trials continue; to cancel them: {cancel}")
                raise MonitoringInterrupted from None
            after_each()

        yield TrialRunner(run_all, snapshot.git, snapshot.folder.name)


MAX_LISTED_RUNS = 20
"""Runs of an array whose overrides are printed."""


def print_scripts(cells: Sequence[Cell], sweep_dir: Path, console: Console) -> None:
    """Print the sbatch files of a sweep, for ``cluster.dry_run=true``. Nothing is written or submitted."""
    runs, invalid = list[tuple[int, Config]](), InvalidPrinter(cells, console, prefix="# ")
    for number, cell in enumerate(cells):
        if cell.config is None:
            invalid.print(number, join_errors(cell.errors))
        else:
            runs.append((number, cell.config))
    for index, group in enumerate(group_by_resources(runs, lambda run: run[1])):
        numbers = [number for number, _ in group]
        directories = tuple(map(str, numbers))
        array = JobArray(f"array{index}", group[0][1], sweep_dir, sweep_dir / SNAPSHOT, directories)
        print_plain(console, f"# {format_runs(numbers)}")
        for number in numbers[:MAX_LISTED_RUNS]:
            overrides = " ".join(map(format_override, cells[number].varied or cells[number].overrides))
            print_plain(console, f"#   {number}: {overrides or 'no overrides'}")
        if len(group) > MAX_LISTED_RUNS:
            print_plain(console, f"#   and {len(group) - MAX_LISTED_RUNS} more")
        print_plain(console, array.render())
    for missing in dict.fromkeys(error for _, config in runs for error in find_missing_data(config)):
        print_plain(console, f"# note: not found on this machine, and checked at submission: {missing}")
    hint = "The folder of the sweep and its files are made at submission."
    print_plain(console, f"# {format_count(len(runs), 'job')}, nothing was submitted. {hint}")


TIMEOUT_S, POLL_S = 60.0, 0.5
"""Slurm's KillWait is 30 s by default, so jobs may need that long to end."""


def cancel_jobs(sweep_dir: Path) -> Cancelled:
    """Cancel the jobs of a sweep, and wait for their end. Raise CancelError if Slurm refuses, or does not answer."""
    entries = run_dirs.latest(sweep_dir)
    active = [run for run in status.poll(sweep_dir) if run.is_active]
    try:
        client.cancel([run.job for run in active if run.job])
    except client.SlurmError as error:
        raise CancelError(f"no job was cancelled: {error}") from None
    cancelled = [entries[run.number] for run in active]
    run_dirs.append(sweep_dir, [run_dirs.Entry(e.run, e.id, e.directory, e.job, "cancelled") for e in cancelled])
    hint = suggest_command("status", sweep_dir)
    left = [
        f"run {number} (job {entries[number].job}) is still ending: check again with {hint}"
        for number in _wait_for_end(sweep_dir)
    ]
    return Cancelled(len(active), left)


def _wait_for_end(sweep_dir: Path) -> list[int]:
    """Wait for the end of all jobs, at most TIMEOUT_S; return the runs that are left. Polling also writes records."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        left = _active_runs(sweep_dir)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(POLL_S)


# Submission of prepared runs: one job array for the runs with equal resources. Ctrl-C cancels what was submitted.


Item = TypeVar("Item")


def submit_runs(
    prepared: Sequence[PreparedRun], sweep_dir: Path, snapshot: Path, max_array_size: int, console: Console
) -> None:
    """Submit one array for each set of runs with equal resources, or several if it exceeds ``max_array_size`` jobs.

    On Ctrl-C, cancel the jobs submitted so far and raise SweepInterrupted. Raise OSError if Slurm does not answer, or
    if a job has no known number.
    """
    (sweep_dir / SLURM).mkdir(exist_ok=True)
    submitted: list[run_dirs.Entry] = []
    try:
        for group in group_by_resources(prepared, lambda run: run.spec.config):
            for start in range(0, len(group), max_array_size):
                # The jobs of every submission that Slurm has received must be in the ledger.
                with processes.defer_interrupts():
                    submitted += _submit_array(group[start : start + max_array_size], sweep_dir, snapshot, console)
    except KeyboardInterrupt:
        raise SweepInterrupted(_cancel_submitted(submitted, sweep_dir)) from None


def _submit_array(
    runs: Sequence[PreparedRun], sweep_dir: Path, snapshot: Path, console: Console
) -> list[run_dirs.Entry]:
    """Submit runs as one array, add them to the ledger at once, and return the entries; none if Slurm refused them."""
    directories = tuple(str(run.directory.relative_to(sweep_dir)) for run in runs)
    used = len(list((sweep_dir / SLURM).glob("array*.sbatch")))
    array = JobArray(f"array{used}", runs[0].spec.config, sweep_dir, snapshot, directories)
    files.write_json(array.path("json"), {"directories": directories})
    array.path("sbatch").write_text(array.render())
    try:
        job = client.submit(array.path("sbatch"))
    except client.UnreachableError as error:
        raise OSError(
            f"Slurm does not answer ({error}); {array.name} was not submitted: try again later with "
            f"{suggest_command('resume', sweep_dir)}"
        ) from None
    except client.UnknownJobError as error:
        raise OSError(
            f"{error}. The job of {array.name} may be in the queue, and distexp does not know its number: look for it "
            f"with squeue --me, and end it with scancel before {suggest_command('resume', sweep_dir)}"
        ) from None
    except client.SlurmError as error:
        for run in runs:  # The other arrays are still submitted.
            refusal = RunError(SUBMISSION_REFUSED, f"sbatch: {error}")
            outcome.failed_record(run.spec, run.directory, "invalid", refusal, None).write(run.directory)
        print_plain(console, f"{describe_runs(runs)}: refused by Slurm: {error}")
        return []
    entries = [
        run_dirs.Entry(run.spec.run.number, run.spec.run.id, directory, f"{job}_{index}", "submitted")
        for index, (run, directory) in enumerate(zip(runs, directories, strict=True))
    ]
    run_dirs.append(sweep_dir, entries)
    print_plain(console, f"job {job}: {describe_runs(runs)}")
    return entries


def _cancel_submitted(entries: Sequence[run_dirs.Entry], sweep_dir: Path) -> str:
    """Cancel the arrays of an interrupted submission, and return what to print."""
    resume = f"to submit the runs: {suggest_command('resume', sweep_dir)}"
    if not entries:
        return f"interrupted: nothing was submitted; {resume}"
    jobs = format_count(len(entries), "submitted job")
    try:
        client.cancel(list(dict.fromkeys(str(entry.job).partition("_")[0] for entry in entries)))
    except client.SlurmError as error:
        return f"interrupted, but {jobs} cannot be cancelled ({error}): try {suggest_command('cancel', sweep_dir)}"
    run_dirs.append(sweep_dir, [replace(entry, state="cancelled", unix_time_s=time.time()) for entry in entries])
    return f"interrupted: {jobs} cancelled; {resume}"


def group_by_resources(items: Iterable[Item], config_of: Callable[[Item], Config]) -> list[list[Item]]:
    """Group runs by what their jobs request, in the order of first appearance."""
    keys: dict[str, str] = {}
    groups: dict[str, list[Item]] = {}
    for item in items:
        config = config_of(item)
        settings = repr((config.name, config.cluster))
        if settings not in keys:
            keys[settings] = resource_key(config)
        groups.setdefault(keys[settings], []).append(item)
    return list(groups.values())


def describe_runs(runs: Sequence[PreparedRun]) -> str:
    """Describe runs of one array: ``runs 0-5, 2 nodes with 2 cpu workers each``."""
    cluster = runs[0].spec.config.cluster
    numbers = format_runs([run.spec.run.number for run in runs])
    workers = format_count(cluster.workers_per_node or 1, f"{cluster.device} worker")
    each = " each" if cluster.nodes > 1 else ""
    return f"{numbers}, {format_count(cluster.nodes, 'node')} with {workers}{each}"

"""Submission of prepared runs: one job array for the runs with equal resources. Ctrl-C cancels what was submitted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from distexp.config import Config
from distexp.config.overrides import format_count, format_runs, suggest_command
from distexp.exceptions import SweepInterrupted
from distexp.launch import ledger, outcome
from distexp.launch.queued_runs import PreparedRun
from distexp.launch.slurm import client
from distexp.launch.slurm.script import JobArray, resource_key
from distexp.runs.attempts import SUBMISSION_REFUSED
from distexp.runs.record_sections import RunError
from distexp.runs.run_dir import SLURM
from distexp.system import files, processes
from distexp.tables.columns import print_plain

Item = TypeVar("Item")


def submit_runs(
    prepared: Sequence[PreparedRun], sweep_dir: Path, snapshot: Path, max_array_size: int, console: Console
) -> None:
    """Submit one array for each set of runs with equal resources, or several if it exceeds ``max_array_size`` jobs.

    On Ctrl-C, cancel the jobs submitted so far and raise SweepInterrupted. Raise OSError if Slurm does not answer.
    """
    (sweep_dir / SLURM).mkdir(exist_ok=True)
    submitted: list[ledger.Entry] = []
    try:
        for group in group_by_resources(prepared, lambda run: run.spec.config):
            for start in range(0, len(group), max_array_size):
                # The jobs of every submission that Slurm has received must be in the ledger.
                with processes.defer_interrupts():
                    submitted += _submit_array(group[start : start + max_array_size], sweep_dir, snapshot, console)
    except KeyboardInterrupt:
        raise SweepInterrupted(_cancel_submitted(submitted, sweep_dir)) from None


def _submit_array(runs: Sequence[PreparedRun], sweep_dir: Path, snapshot: Path, console: Console) -> list[ledger.Entry]:
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
    except client.SlurmError as error:
        for run in runs:  # The other arrays are still submitted.
            refusal = RunError(SUBMISSION_REFUSED, f"sbatch: {error}")
            outcome.failed_record(run.spec, run.directory, "invalid", refusal, None).write(run.directory)
        print_plain(console, f"{describe_runs(runs)}: refused by Slurm: {error}")
        return []
    entries = [
        ledger.Entry(run.spec.run.number, run.spec.run.id, directory, f"{job}_{index}", "submitted")
        for index, (run, directory) in enumerate(zip(runs, directories, strict=True))
    ]
    ledger.append(sweep_dir, entries)
    print_plain(console, f"job {job}: {describe_runs(runs)}")
    return entries


def _cancel_submitted(entries: Sequence[ledger.Entry], sweep_dir: Path) -> str:
    """Cancel the arrays of an interrupted submission, and return what to print."""
    resume = f"to submit the runs: {suggest_command('resume', sweep_dir)}"
    if not entries:
        return f"interrupted: nothing was submitted; {resume}"
    jobs = format_count(len(entries), "submitted job")
    try:
        client.cancel(list(dict.fromkeys(str(entry.job).partition("_")[0] for entry in entries)))
    except client.SlurmError as error:
        return f"interrupted, but {jobs} cannot be cancelled ({error}): try {suggest_command('cancel', sweep_dir)}"
    ledger.append(sweep_dir, [replace(entry, state="cancelled", unix_time_s=time.time()) for entry in entries])
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

"""Command ``distexp cancel DIR``: end the runs of a sweep, on Slurm or on this machine."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from distexp.exceptions import run_until_pipe_closes
from distexp.launch import ledger
from distexp.launch.local.cancel import cancel_local
from distexp.launch.slurm import client
from distexp.launch.slurm.status import poll
from distexp.runs.command_text import suggest_command
from distexp.runs.existing import ExistingRuns
from distexp.runs.listing import format_count
from distexp.runs.sweep_dirs import not_a_sweep

TIMEOUT_S, POLL_S = 60.0, 0.5
"""Slurm's KillWait is 30 s by default, so jobs may need that long to end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """End the runs of a sweep, wait for their end, and print how many there were.

    Returns:
        0; 1 if a run could not be ended; 2 if the directory is not a sweep.
    """
    parser = argparse.ArgumentParser(
        prog="distexp cancel", description="End the runs of a sweep, on Slurm or on this machine."
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory of a sweep")
    sweep_dir = parser.parse_args(arguments).directory
    if ledger.latest(sweep_dir):
        return _cancel_jobs(sweep_dir)
    if not ExistingRuns.read(sweep_dir).runs:
        print(f"distexp: {not_a_sweep(sweep_dir, 'run')}", file=sys.stderr)
        return 2
    return _cancel_local(sweep_dir)


def _cancel_local(sweep_dir: Path) -> int:
    try:
        cancelled = cancel_local(sweep_dir)
    except PermissionError:
        print("distexp: the runs belong to another user, who can cancel them", file=sys.stderr)
        return 1
    print(f"{format_count(len(cancelled.runs) - len(cancelled.left), 'run')} cancelled")
    for run in cancelled.left:
        print(f"run {run.number} is still ending: check again with {suggest_command('status', sweep_dir)}")
    for run, host in cancelled.elsewhere:
        hint = suggest_command("cancel", sweep_dir)
        print(f"distexp: run {run.number} was started on {host}: cancel it there with {hint}", file=sys.stderr)
    return 1 if cancelled.elsewhere else 0


def _cancel_jobs(sweep_dir: Path) -> int:
    entries = ledger.latest(sweep_dir)
    active = [run for run in poll(sweep_dir) if run.is_active]
    try:
        client.cancel([run.job for run in active if run.job])
    except client.SlurmError as error:
        print(f"distexp: no job was cancelled: {error}", file=sys.stderr)
        return 1
    cancelled = [entries[run.number] for run in active]
    ledger.append(sweep_dir, [ledger.Entry(e.run, e.id, e.directory, e.job, "cancelled") for e in cancelled])
    left = _wait_for_end(sweep_dir)
    print(f"{format_count(len(active), 'run')} cancelled")
    hint = suggest_command("status", sweep_dir)
    for number in left:
        print(f"run {number} (job {entries[number].job}) is still ending: check again with {hint}")
    return 0


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


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))

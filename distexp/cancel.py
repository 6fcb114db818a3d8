"""Command ``distexp cancel DIR``: cancel the jobs of a sweep that have not ended."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from distexp.exceptions import run_until_pipe_closes
from distexp.launch import ledger
from distexp.launch.slurm import client
from distexp.launch.slurm.status import poll
from distexp.runs.run_dir import LEDGER
from distexp.runs.text import format_count, suggest_command

TIMEOUT_S, POLL_S = 60.0, 0.5
"""Slurm's KillWait is 30 s by default, so jobs may need that long to end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Cancel the jobs, wait for their end, and print how many runs were cancelled.

    Returns:
        0; 1 if the jobs could not be cancelled; 2 if the directory is not a sweep on Slurm.
    """
    parser = argparse.ArgumentParser(prog="distexp cancel", description="Cancel the jobs of a sweep.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory of a sweep")
    sweep_dir = parser.parse_args(arguments).directory
    entries = ledger.latest(sweep_dir)
    if not entries:
        print(f"distexp: {sweep_dir} has no {LEDGER}: only sweeps on Slurm can be cancelled", file=sys.stderr)
        return 2
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

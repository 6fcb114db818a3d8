"""Cancellation of the jobs of a sweep."""

from __future__ import annotations

import time
from pathlib import Path

from distexp.launch import ledger
from distexp.launch.launcher import CancelError, Cancelled
from distexp.launch.slurm import client
from distexp.launch.slurm.status import poll
from distexp.runs.command_text import suggest_command

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

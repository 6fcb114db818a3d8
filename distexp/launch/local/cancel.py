"""End of the local runs of a sweep, also if their command has lost its terminal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from distexp.launch.launcher import CancelError, Cancelled
from distexp.runs.command_text import suggest_command
from distexp.runs.existing import ExistingRun
from distexp.runs.local_state import local_state
from distexp.runs.owner import Owner, read_agent, read_launcher

TIMEOUT_S, POLL_S = 30.0, 0.1
"""A launcher needs a few seconds to end its workers and to write the record."""


def cancel_local(sweep_dir: Path, found: Sequence[ExistingRun]) -> Cancelled:
    """End the launchers of runs on this machine, and wait for the runs.

    A launcher ends its workers, writes the record of its run, and starts no other run.

    Raises:
        CancelError: a launcher belongs to another user.
    """
    active = [run for run in found if local_state(run).is_active]
    here = [run for run in active if _is_here(run)]
    launchers = [launcher for run in found if (launcher := read_launcher(run.directory)) is not None]
    for pid in {launcher.pid for launcher in launchers if launcher.is_alive}:
        _end(pid)
    left = _wait(here, launchers)
    status, cancel = suggest_command("status", sweep_dir), suggest_command("cancel", sweep_dir)
    return Cancelled(
        len(here) - len(left),
        [f"run {number} is still ending: check again with {status}" for number in left],
        [
            f"run {run.number} was started on {_host(run)}: cancel it there with {cancel}"
            for run in active if run not in here
        ],
    )  # fmt: skip


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError:
        raise CancelError("the runs belong to another user, who can cancel them") from None


def _is_here(run: ExistingRun) -> bool:
    launcher = read_launcher(run.directory)
    return launcher is not None and launcher.is_local


def _host(run: ExistingRun) -> str:
    launcher = read_launcher(run.directory)
    return launcher.host if launcher is not None else "an unknown machine"


def _wait(runs: Sequence[ExistingRun], launchers: Sequence[Owner]) -> list[int]:
    """Wait for the end of all processes; return the numbers of the runs that are left."""
    deadline = time.monotonic() + TIMEOUT_S
    owners = [*launchers, *(agent for run in runs if (agent := read_agent(run.directory)) is not None)]
    while any(owner.is_alive for owner in owners) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    alive = {run.directory for run in runs if (agent := read_agent(run.directory)) is not None and agent.is_alive}
    alive |= {run.directory for run in runs if (own := read_launcher(run.directory)) is not None and own.is_alive}
    return [run.number for run in runs if run.directory in alive]

"""End of the local runs of a sweep, also if their command has lost its terminal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from distexp.runs.existing import ExistingRun
from distexp.runs.local_state import local_state
from distexp.runs.owner import Owner, read_agent, read_launcher
from distexp.runs.run_state import RunState

TIMEOUT_S, POLL_S = 30.0, 0.1
"""A launcher needs a few seconds to end its workers and to write the record."""


class CancelledRuns(NamedTuple):
    """Result of cancelling local runs.

    Attributes:
        runs: Runs that were running on this machine.
        left: Runs of them that have not ended in time.
        elsewhere: Runs that another machine seems to run, each with its host.
    """

    runs: list[RunState]
    left: list[RunState]
    elsewhere: list[tuple[RunState, str]]


def cancel_local(found: Sequence[ExistingRun]) -> CancelledRuns:
    """End the launchers of runs on this machine, and wait for the runs.

    A launcher ends its workers, writes the record of its run, and starts no other run.

    Raises:
        PermissionError: if a launcher belongs to another user.
    """
    active = [(run, state) for run in found if (state := local_state(run)).is_active]
    here = [(run, state) for run, state in active if _is_here(run)]
    launchers = [launcher for run in found if (launcher := read_launcher(run.directory)) is not None]
    for pid in {launcher.pid for launcher in launchers if launcher.is_alive}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    left = _wait([run for run, _ in here], launchers)
    elsewhere = [(state, _host(run)) for run, state in active if not _is_here(run)]
    return CancelledRuns([state for _, state in here], left, elsewhere)


def _is_here(run: ExistingRun) -> bool:
    launcher = read_launcher(run.directory)
    return launcher is not None and launcher.is_local


def _host(run: ExistingRun) -> str:
    launcher = read_launcher(run.directory)
    return launcher.host if launcher is not None else "an unknown machine"


def _wait(runs: Sequence[ExistingRun], launchers: Sequence[Owner]) -> list[RunState]:
    """Wait for the end of all processes; return the runs that are left."""
    deadline = time.monotonic() + TIMEOUT_S
    owners = [*launchers, *(agent for run in runs if (agent := read_agent(run.directory)) is not None)]
    while any(owner.is_alive for owner in owners) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    alive = {run.directory for run in runs if (agent := read_agent(run.directory)) is not None and agent.is_alive}
    alive |= {run.directory for run in runs if (own := read_launcher(run.directory)) is not None and own.is_alive}
    return [local_state(run) for run in runs if run.directory in alive]

"""State of a run that is not on Slurm, from the files in its directory and its launcher."""

from __future__ import annotations

import time

from distexp.runs.existing import ExistingRun
from distexp.runs.owner import read_agent, read_launcher
from distexp.runs.progress import last_activity, read_progress
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import RECORD
from distexp.runs.run_state import RunState

MAX_IDLE_S = 15.0
"""A run of another machine with more recent activity is running; memory samples and steps count as activity."""


def local_state(run: ExistingRun) -> RunState:
    """Return the state of a run. Its launcher decides, if it was started on this machine."""
    if run.status is not None:
        return _finished_state(run)
    launcher, agent = read_launcher(run.directory), read_agent(run.directory)
    if launcher is None or not launcher.is_local:
        return _state_by_activity(run)
    if launcher.is_alive:
        return _state(run, "running")
    if (run.directory / RECORD).exists():  # It is damaged, or was written since the run was read.
        return _finished_state(run)
    reason = f"its launcher (process {launcher.pid}) ended without a record"
    return _state(run, "ending" if agent is not None and agent.is_alive else "no record", reason)


def _finished_state(run: ExistingRun) -> RunState:
    """Return the state of a run with a record, which may be damaged or of another version."""
    try:
        record = RunRecord.read(run.directory / RECORD)
    except ValueError as error:
        return _state(run, "no record", str(error))
    return RunState.from_record(run.number, run.directory, None, record)


def _state_by_activity(run: ExistingRun) -> RunState:
    """Return the state of a run without a launcher on this machine: the age of its files decides."""
    active_at = last_activity(run.directory)
    idle_s = time.time() - active_at
    if idle_s < MAX_IDLE_S and read_progress(run.directory).phase != "done":
        return _state(run, "running")
    reason = f"last activity {idle_s:,.0f} s ago (process probably killed)" if active_at else "its record is damaged"
    return _state(run, "no record", reason)


def _state(run: ExistingRun, state: str, reason: str = "") -> RunState:
    return RunState(run.number, run.directory, job=None, state=state, reason=reason)

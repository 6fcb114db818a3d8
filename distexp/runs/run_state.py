"""State of a run at one moment, for tables and for following a sweep."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distexp.config.overrides import suggest_command
from distexp.runs import attempts, texts
from distexp.runs import run_dir as names
from distexp.runs.events import phase_events_of
from distexp.runs.record import ExistingRun, RunRecord
from distexp.system import files, processes, typed_values

ACTIVE = ("pending", "running", "ending", "unknown")


@dataclass(frozen=True)
class RunState:
    """State of one run."""

    number: int  # the run's number in its sweep
    directory: Path
    job: str | None  # the Slurm job as ARRAY_INDEX; None for a run that is not on Slurm
    state: str  # one of ACTIVE, "no record", or the status of the record
    reason: str = ""  # why the run is waiting, which of its processes is stopped, or why it did not complete
    nodes: str = ""  # Slurm's list of the job's nodes
    record: RunRecord | None = None  # the record of a run that has ended

    @classmethod
    def from_record(cls, number: int, directory: Path, job: str | None, record: RunRecord) -> RunState:
        """Return the state of a run that has ended."""
        reason = " ".join(texts.failure_text(record).split())
        return cls(number, directory, job, record.status, reason, record=record)

    @property
    def is_active(self) -> bool:
        """Whether the run may not have ended yet."""
        return self.state in ACTIVE


@dataclass(frozen=True)
class Progress:
    """The latest phase, step and loss of a run. None if it has not reported one."""

    phase: str | None = None
    step: int | None = None
    steps: int | None = None
    loss: float | None = None

    def __str__(self) -> str:
        if self.step is None:
            return self.phase or "start"
        loss = "nan" if self.loss is None else f"{self.loss:.4f}"
        return f"{self.phase} step {self.step}/{self.steps or '?'}, loss {loss}"


def read_progress(directory: Path) -> Progress:
    """Read the progress of a run from its metrics and events. A file that cannot be read is named as the phase."""
    try:
        events = files.read_entries(directory / names.EVENTS)
        phases = phase_events_of(events)
        last_step, last_build = (
            files.read_last_entry(directory / names.METRICS),
            files.read_last_entry(directory / names.OPERATORS),
        )
        is_compiling = last_build and not last_build.keys() & {"compiled_s", "waited_s"}
        counts = (_count_of(entry, "total_steps") for entry in events)
        return Progress(
            phase=phases[-1].phase if phases else ("compile" if is_compiling else None),
            step=_count_of(last_step, "step"),
            steps=next((count for count in counts if count is not None), None),
            loss=typed_values.number_of(last_step, "loss"),
        )
    except OSError as error:
        return Progress(phase=f"unknown ({error.filename}: {error.strerror})")


def _count_of(entry: Mapping[str, Any], key: str) -> int | None:
    number = typed_values.number_of(entry, key)
    return None if number is None else int(number)


class Heartbeat:
    """Writer of ``run_dir/heartbeat``, whose age the agents check.

    It touches the file at most once a second. On a network file system each touch is a message to the server.
    """

    def __init__(self, run_dir: Path, *, enabled: bool) -> None:
        self.path = run_dir / names.HEARTBEAT if enabled else None
        self._last_touch_s = 0.0

    def beat(self) -> None:
        """Record that a step is done."""
        now = time.monotonic()
        if self.path is not None and now - self._last_touch_s >= 1:
            self.path.touch()
            self._last_touch_s = now


def record_progress(run_dir: Path) -> None:
    """Record progress of a process that does not train, as the search of a micro-batch."""
    (run_dir / names.EVENTS).touch()


def last_heartbeat(run_dir: Path) -> float:
    """Return the Unix time in seconds of the last step, event or build step; 0 before the first."""
    return max(_modified(run_dir / name) for name in (names.HEARTBEAT, names.EVENTS, names.OPERATORS))


def last_build_step(run_dir: Path) -> float:
    """Return the Unix time in seconds at which the build of operators last reported; 0 if there was none."""
    return _modified(run_dir / names.OPERATORS)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a command or an agent to stop its run after a checkpoint. A worker prints its stacks at SIGUSR1."""

POLL_S = 1.0
"""Shortest time between two polls. On a network file system each poll is a message to the server."""


def request_stop(run_dir: Path, reason: str) -> None:
    """Ask the workers of a run to write a checkpoint and to end because of a time limit, a preemption or a signal.

    Rank 0 polls the file, which works for workers that are still starting, and for all nodes.
    """
    files.write_json(run_dir / names.STOP_REQUEST, {"unix_time_s": time.time(), "reason": reason})


def read_reason(run_dir: Path) -> str | None:
    """Return why a run was asked to stop, or None if it was not."""
    try:
        return str(json.loads((run_dir / names.STOP_REQUEST).read_text())["reason"])
    except FileNotFoundError:
        return None


class StopRequest:
    """Poller of the stop request, at most once a second. A disabled one never polls.

    A new attempt archives or deletes the request for an earlier one. So the file may be older than this process, for
    example if it was written while operators were built.
    """

    def __init__(self, run_dir: Path, *, enabled: bool) -> None:
        self.run_dir = run_dir
        self.enabled = enabled
        self.received = False
        self._next_poll_s = 0.0

    def __call__(self) -> bool:
        """Return whether a stop was requested; once true, it stays true."""
        if self.enabled and not self.received and time.monotonic() >= self._next_poll_s:
            self._next_poll_s = time.monotonic() + POLL_S
            self.received = read_reason(self.run_dir) is not None
        return self.received

    def reason(self) -> str:
        """Return why the run was asked to stop."""
        return read_reason(self.run_dir) or "unknown"


MAX_IDLE_S = 15.0
"""A run of another machine with more recent activity is running; memory samples and steps count as activity."""


def local_state(run: ExistingRun) -> RunState:
    """Return the state of a run. Its launcher decides, if it was started on this machine."""
    if run.status is not None:
        return _finished_state(run)
    launcher, agent = attempts.read_launcher_process(run.directory), attempts.read_agent_process(run.directory)
    if launcher is None or not launcher.is_local:
        return _state_by_activity(run)
    if launcher.is_alive:
        parts = {"launcher": launcher, "agent": agent}.items()
        stopped = (
            (name, each.pid) for name, each in parts if each and each.is_alive and processes.is_stopped(each.pid)
        )
        hints = [f"its {name} (process {pid}) is stopped by a signal: kill -CONT {pid}" for name, pid in stopped]
        return _state(run, "running", ", ".join(hints))
    if (run.directory / names.RECORD).exists():  # It is damaged, or was written since the run was read.
        return _finished_state(run)
    reason = f"its launcher (process {launcher.pid}) ended without a record"
    return _state(run, "ending" if agent is not None and agent.is_alive else "no record", reason)


def dead_launcher(run: ExistingRun) -> int | None:
    """Return the process id of a run's launcher if it died on this machine without a record, and its agent too."""
    launcher = attempts.read_launcher_process(run.directory)
    if launcher is None or not launcher.is_local or (run.directory / names.RECORD).exists():
        return None
    return launcher.pid if local_state(run).state == "no record" else None


def last_activity(directory: Path) -> float:
    """Return the Unix time in seconds of the last step, event, memory sample or start of a run; 0 without files."""
    paths = (directory / names.SPEC, *names.memory_trace_paths(directory))
    return max([last_heartbeat(directory), *(path.stat().st_mtime for path in paths if path.exists())])


def _finished_state(run: ExistingRun) -> RunState:
    """Return the state of a run with a record, which may be damaged or of another version."""
    try:
        record = RunRecord.read(run.directory / names.RECORD)
    except ValueError as error:
        return _state(run, "no record", str(error))
    return RunState.from_record(run.number, run.directory, None, record)


def _state_by_activity(run: ExistingRun) -> RunState:
    """Return the state of a run without a launcher on this machine: the age of its files decides.

    Without a file of an attempt it has not started, as after a submission that Slurm did not receive.
    """
    if not any((run.directory / name).exists() for name in (names.RECORD, *names.ATTEMPT_FILES)):
        folders = (run.directory, *run.directory.parents)
        sweep = next((folder for folder in folders if (folder / names.COMMAND).is_file()), None)
        if sweep is None or not attempts.is_locked(sweep):  # else its command may just submit it
            hint = f": {suggest_command('resume', sweep)}" if sweep else ""
            return _state(run, "no record", f"not started{hint}")
    active_at = last_activity(run.directory)
    idle_s = time.time() - active_at
    if idle_s < MAX_IDLE_S and read_progress(run.directory).phase != "done":
        return _state(run, "running")
    reason = f"last activity {idle_s:,.0f} s ago (process probably killed)" if active_at else "its record is damaged"
    return _state(run, "no record", reason)


def _state(run: ExistingRun, state: str, reason: str = "") -> RunState:
    return RunState(run.number, run.directory, job=None, state=state, reason=reason)

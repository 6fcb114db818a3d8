"""The Slurm job of a node task, and the tasks on its other nodes (peers)."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import submitit

from distexp.checkpoints.folder import list_checkpoints, step_of
from distexp.launch.agent import read_rendezvous
from distexp.launch.slurm.client import SlurmError, query_jobs, requeue
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import AGENT_EXIT
from distexp.runs.spec import RunSpec
from distexp.system.files import write_json

POLL_S = 0.5


@dataclass(frozen=True)
class Job:
    """The Slurm job of this task."""

    id: str  # The job as ARRAY_INDEX.
    index: int
    attempt: str  # The job with its restart count, unique for each start.
    node: int  # The number of this node in the job; 0 is the head.
    hosts: list[str]

    @classmethod
    def from_environment(cls) -> Job:
        """Read Slurm's environment variables."""
        variables = os.environ  # SLURM_JOB_ID is not used: for the last element it is the id of the array.
        index = variables["SLURM_ARRAY_TASK_ID"]
        job = f"{variables['SLURM_ARRAY_JOB_ID']}_{index}"
        return cls(
            id=job,
            index=int(index),
            attempt=f"{job}.{variables.get('SLURM_RESTART_COUNT', '0')}",
            node=int(variables["SLURM_PROCID"]),
            hosts=list(submitit.JobEnvironment().hostnames),
        )


class SupersededError(BaseException):
    """A later attempt has started. This is not an Exception, so that no handler of errors catches it."""


@dataclass
class Peers:
    """The agents of the other nodes, observed through their exit status files."""

    run_dir: Path
    job: Job
    nodes: int
    last_poll: float = 0.0  # Monotonic time in seconds.
    started: bool = False  # Whether the head has announced this attempt.
    codes: dict[int, int] = field(default_factory=dict)  # Exit codes by node, of those that have ended.

    def read_exit_codes(self) -> None:
        """Read the exit codes written since the last call."""
        for node in self.missing():
            try:
                status = json.loads(AGENT_EXIT.path(self.run_dir, node).read_text())
            except (OSError, ValueError):
                continue
            if status["attempt"] == self.job.attempt:
                self.codes[node] = status["code"]

    def any_failed(self) -> bool:
        """Return whether another node has failed. Raise SupersededError if a later attempt has started.

        The files are read at most twice a second, to limit the load on the file system.
        """
        if time.monotonic() - self.last_poll > POLL_S:
            self.last_poll = time.monotonic()
            self.check_latest()
            self.read_exit_codes()
        return any(self.codes.values())

    def check_latest(self) -> None:
        """Raise SupersededError if a later attempt has started. Slurm starts one if it loses contact with the nodes."""
        latest = read_rendezvous(self.run_dir)
        if latest is not None and latest.attempt == self.job.attempt:
            self.started = True
        elif latest is not None and self.started:
            raise SupersededError(f"attempt {self.job.attempt} was replaced by attempt {latest.attempt}")

    def wait_all(self, seconds: float) -> dict[int, int]:
        """Wait for the exit codes of all other nodes. A node that writes none counts as killed."""
        deadline = time.monotonic() + seconds
        self.read_exit_codes()
        while self.missing() and time.monotonic() < deadline:
            time.sleep(0.1)
            self.read_exit_codes()
        return self.codes | dict.fromkeys(self.missing(), -int(signal.SIGKILL))

    def missing(self) -> set[int]:
        """Return the other nodes that have not written an exit code."""
        return set(range(self.nodes)) - {self.job.node} - set(self.codes)


def write_exit_status(run_dir: Path, job: Job, code: int) -> None:
    """Write this node's exit code for the other nodes."""
    path = AGENT_EXIT.path(run_dir, job.node)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"attempt": job.attempt, "code": code})


def requeue_if_needed(spec: RunSpec, run_dir: Path, job: str, record: RunRecord, *, node_lost: bool) -> bool:
    """Requeue an interrupted job, so that its run resumes, and return whether it was requeued.

    A job is requeued if it was stopped or lost a node, and left a later checkpoint than the one it started from. An
    attempt that made no progress is not repeated.

    With ``node_lost`` a node wrote no exit code. Slurm requeues the job itself when it notices this, but the head may
    notice first.
    """
    interrupted = record.status == "preempted" or (node_lost and record.status == "killed")
    if not interrupted or not spec.config.cluster.requeue:
        return False
    steps = (step for path in list_checkpoints(run_dir) if (step := step_of(path)) is not None)
    newest, first = next(steps, 0), record.run.attempts[-1]["resumed_from_step"] or 0
    if newest <= first:
        print(f"not requeued: this attempt started at step {first} and left no later checkpoint", flush=True)
        return False
    try:
        state = query_jobs([job]).get(job) if node_lost else None
        if node_lost and (state is None or state.state != "RUNNING"):
            return False  # The job was cancelled, or Slurm requeues it itself.
        requeue(job)
    except SlurmError as error:
        print(f"not requeued: {error}", flush=True)
        return False
    print(f"requeued as job {job}, to resume from step {newest}", flush=True)
    return True

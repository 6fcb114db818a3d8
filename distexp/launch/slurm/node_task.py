"""The task of a Slurm job on one node.

Started as ``srun python -m distexp.launch.slurm.node_task ARRAY.json``. The task of the head node waits for the files
with the exit codes of the others, and writes the record. Its exit code is that of the job.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import submitit

from distexp.checkpoints.folder import list_checkpoints, step_of
from distexp.launch import failures, outcome
from distexp.launch.agent import NodeContext, StoppedError, raise_stopped, read_rendezvous, run_node, write_start_error
from distexp.launch.failures import STOPPED_CODE
from distexp.launch.slurm.client import SlurmError, minutes_left, query_jobs, requeue
from distexp.runs import run_state, texts
from distexp.runs.record import RunRecord, RunSpec
from distexp.runs.run_dir import AGENT_EXIT
from distexp.system import cgroups, processes
from distexp.system.files import write_json
from distexp.tracking.trackers import tracked

PEERS_TIMEOUT_S, STOPPED_PEERS_TIMEOUT_S = 60.0, 6.0
"""How long the head waits for the other nodes: after a normal end, and after Slurm's SIGTERM."""

REQUEUE_WAIT_S = 30.0
"""How long the head of a requeued job waits until Slurm ends it."""

TIME_LIMIT_MARGIN_MIN = 1.5
"""Slurm sends its signal up to a minute early; within this margin it announces the time limit."""


def main() -> None:
    """Run a node to its end; the exit code of the head is 0 if the run completed."""
    try:
        sys.exit(run_task())
    except SupersededError as error:
        sys.exit(f"{error}: this attempt stops without a record")


def run_task() -> int:
    """Run this node's part of a job, and return the exit code."""
    started, job = time.time(), Job.from_environment()
    list_path = Path(sys.argv[1])  # It has the directories of the job array, relative to the sweep directory.
    run_dir = list_path.parent.parent / json.loads(list_path.read_text())["directories"][job.index]
    signal.signal(signal.SIGTERM, raise_stopped)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(processes.NOTICE_SIGNAL, _stop_request_handler(run_dir, job))
    spec = RunSpec.read(run_dir)
    task = NodeTask(spec, run_dir, job, Peers(run_dir, job, spec.nodes), started)
    if job.node != 0:
        task.run_attempt()
        return 0
    with tracked(spec, run_dir) as messages:
        code = task.run_attempt()
        record = task.write_record(code)
    reason = texts.failure_text(record)
    print(f"{run_dir}: {record.status}" + (f": {reason}" if reason else ""), flush=True)
    for message in messages:
        print(message, flush=True)
    if requeue_if_needed(spec, run_dir, job.id, record, node_lost=bool(task.peers.missing())):
        time.sleep(REQUEUE_WAIT_S)
    return 0 if record.status == "completed" else 1


def _stop_request_handler(run_dir: Path, job: Job) -> Callable[[int, FrameType | None], None]:
    """Return the handler of the signal that Slurm sends before it ends a job: the head requests a checkpoint."""

    def handle(number: int, frame: FrameType | None) -> None:
        if job.node == 0:
            left = minutes_left(job.id)
            margin = RunSpec.read(run_dir).config.cluster.signal_delay_s / 60 + TIME_LIMIT_MARGIN_MIN
            reason = "time_limit" if left is not None and left <= margin else "preemption"
            run_state.request_stop(run_dir, reason)

    return handle


@dataclass(frozen=True)
class NodeTask:
    """This node's part of a job."""

    spec: RunSpec
    run_dir: Path
    job: Job
    peers: Peers
    started: float  # Start of this task, in Unix seconds.

    def run_attempt(self) -> int:
        """Run this node's agent, write its exit code for the other nodes, and return it."""
        code, kills_before = STOPPED_CODE, cgroups.oom_kills()
        try:
            if self.job.node == 0:
                outcome.start_attempt(self.spec, self.run_dir, self.job.id, self.job.hosts)
                failures.save_counters(self.run_dir)
            context = NodeContext(self.job.node, node_address(), self.job.attempt, self.peers.any_failed)
            code = run_node(self.spec, self.run_dir, context, self.started)
        except StoppedError:
            pass
        except OSError as error:
            code = 1
            write_start_error(self.run_dir, self.job.node, error)
        self.peers.check_latest()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.job.node != 0:  # Node 0 writes the record, and compares its own counters then.
            failures.mark_if_killed(self.run_dir, self.job.node, kills_before)
        write_exit_status(self.run_dir, self.job, code)
        return code

    def write_record(self, code: int) -> RunRecord:
        """Wait for the other nodes, write the record, and return it."""
        timeout_s = STOPPED_PEERS_TIMEOUT_S if code == STOPPED_CODE else PEERS_TIMEOUT_S
        codes = {0: code, **self.peers.wait_all(timeout_s)}
        if code != STOPPED_CODE:
            return outcome.finalize_run(self.spec, self.run_dir, codes, self.started)
        lost = [node for node, other in codes.items() if other == -signal.SIGKILL]
        status, why = ("killed", f"node {lost[0]} was lost, and Slurm ended the job") if lost else self._stop_cause()
        return outcome.finalize_run(self.spec, self.run_dir, codes, self.started, why, stopped_status=status)

    def _stop_cause(self) -> tuple[str, str]:
        """Return the status of a run that Slurm stopped, and why, from the signal that it sent before."""
        try:
            reason = run_state.read_reason(self.run_dir)
        except (OSError, ValueError, KeyError):  # a file system that fails while Slurm ends the job
            reason = None
        if reason is None:
            return "killed", "the job was cancelled"
        if reason == "time_limit":
            return "timeout", "the job reached its time limit"
        return "preempted", "the job was preempted by another job"


def node_address() -> str:
    """Return this node's name in Slurm, or its hostname if that name has no address."""
    name = os.environ.get("SLURMD_NODENAME", "")
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return socket.gethostname()
    return name or socket.gethostname()


# The Slurm job of a node task, and the tasks on its other nodes (peers).


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


if __name__ == "__main__":
    main()

"""The task of a Slurm job on one node.

Started as ``srun python -m distexp.launch.slurm.node_task ARRAY.json``. Each task runs the agent of its node and
writes its exit code to a file. The task of the head node waits for those files and then writes the record. Its own
exit code is that of the job, so Slurm reports failed runs as FAILED.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from distexp.checkpoints.folder import list_checkpoints, step_of
from distexp.launch import oom
from distexp.launch.agent import NodeContext, StoppedError, raise_stopped, run_node
from distexp.launch.failures import STOPPED_CODE
from distexp.launch.outcome import finalize_run, start_attempt
from distexp.launch.slurm.client import SlurmError, minutes_left, query_jobs, requeue
from distexp.launch.slurm.peers import Job, Peers, SupersededError, write_exit_status
from distexp.runs import stop_request
from distexp.runs.errors import write_error
from distexp.runs.failure_text import failure_text
from distexp.runs.record import RunError, RunRecord
from distexp.runs.run_dir import agent_error_path
from distexp.runs.spec import RunSpec
from distexp.system.processes import NOTICE_SIGNAL
from distexp.tracking.process import tracked

PEERS_TIMEOUT_S, STOPPED_PEERS_TIMEOUT_S = 60.0, 6.0
"""How long the head waits for the other nodes: after a normal end, and after Slurm's SIGTERM."""

REQUEUE_WAIT_S = 30.0
TIME_LIMIT_MARGIN_MIN = 1.5
"""Slurm sends its signal up to a minute early; within this margin it announces the time limit."""


def node_address() -> str:
    """Return this node's name in Slurm, or its hostname if that name has no address."""
    name = os.environ.get("SLURMD_NODENAME", "")
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return socket.gethostname()
    return name or socket.gethostname()


def main() -> None:
    """Run a node to its end; the exit code of the head is 0 if the run completed."""
    try:
        sys.exit(run_task())
    except SupersededError as error:
        sys.exit(f"{error}: this attempt stops without a record")


def run_task() -> int:
    """Run this node's part of a job, and return the exit code."""
    started, job = time.time(), Job.from_environment()
    list_path = Path(sys.argv[1])
    directory = json.loads(list_path.read_text())["directories"][int(os.environ["SLURM_ARRAY_TASK_ID"])]
    run_dir = list_path.parent.parent / directory
    signal.signal(signal.SIGTERM, raise_stopped)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(NOTICE_SIGNAL, _stop_request_handler(run_dir, job))
    spec = RunSpec.read(run_dir)
    peers = Peers(run_dir, job, spec.nodes)
    if job.node != 0:
        run_attempt(spec, run_dir, job, peers, started)
        return 0
    with tracked(spec, run_dir) as tracking:
        code = run_attempt(spec, run_dir, job, peers, started)
        record = write_record(spec, run_dir, code, peers, started)
    reason = failure_text(record)
    print(f"{run_dir}: {record.status}" + (f": {reason}" if reason else ""), flush=True)
    for message in tracking.messages:
        print(message, flush=True)
    if requeue_if_needed(spec, run_dir, job, record, node_lost=bool(peers.missing())):
        time.sleep(REQUEUE_WAIT_S)  # until Slurm ends this process
    return 0 if record.status == "completed" else 1


def requeue_if_needed(spec: RunSpec, run_dir: Path, job: Job, record: RunRecord, *, node_lost: bool) -> bool:
    """Requeue an interrupted job, and return whether it was requeued.

    A job is requeued if it was stopped or lost a node, and left a later checkpoint than the one it started from.
    Slurm requeues the job itself when it notices a lost node, but the head may notice first. An attempt that made
    no progress is not repeated.
    """
    interrupted = record.status == "preempted" or (node_lost and record.status == "killed")
    if not interrupted or not spec.config.cluster.requeue:
        return False
    newest = next((step for path in list_checkpoints(run_dir) if (step := step_of(path)) is not None), 0)
    first = record.run.attempts[-1]["resumed_from_step"] or 0
    if newest <= first:
        print(f"not requeued: this attempt started at step {first} and left no later checkpoint", flush=True)
        return False
    try:
        if node_lost and not _is_running(job):
            return False  # the job was cancelled, or Slurm requeues it itself
        requeue(job.id)
    except SlurmError as error:
        print(f"not requeued: {error}", flush=True)
        return False
    print(f"requeued as job {job.id}, to resume from step {newest}", flush=True)
    return True


def _is_running(job: Job) -> bool:
    """Return whether Slurm still considers the job as running."""
    state = query_jobs([job.id]).get(job.id)
    return state is not None and state.state == "RUNNING"


def run_attempt(spec: RunSpec, run_dir: Path, job: Job, peers: Peers, started: float) -> int:
    """Run this node's agent, write its exit code for the other nodes, and return it."""
    code = STOPPED_CODE
    try:
        if job.node == 0:
            start_attempt(spec, run_dir, job.id, job.hosts)
            oom.save_counters(run_dir)
        code = run_node(spec, run_dir, NodeContext(job.node, node_address(), job.attempt, peers.any_failed), started)
    except StoppedError:
        pass
    except TimeoutError as error:
        code = _write_no_rendezvous(run_dir, job, error)
    peers.check_latest()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    write_exit_status(run_dir, job, code)
    return code


def write_record(spec: RunSpec, run_dir: Path, code: int, peers: Peers, started: float) -> RunRecord:
    """Wait for the other nodes, write the record, and return it.

    Args:
        spec: The run.
        run_dir: The run directory.
        code: Exit code of the head's agent.
        peers: The other nodes.
        started: Unix time in seconds.
    """
    codes = {0: code, **peers.wait_all(STOPPED_PEERS_TIMEOUT_S if code == STOPPED_CODE else PEERS_TIMEOUT_S)}
    if code != STOPPED_CODE:
        return finalize_run(spec, run_dir, codes, started)
    lost = [node for node, other in codes.items() if other == -signal.SIGKILL]
    if lost:
        return finalize_run(spec, run_dir, codes, started, f"node {lost[0]} was lost, and Slurm ended the job")
    status, reason = stop_reason(run_dir)
    return finalize_run(spec, run_dir, codes, started, reason, stopped_status=status)


def stop_reason(run_dir: Path) -> tuple[str, str]:
    """Return status and reason of a run that Slurm stopped."""
    try:
        reason = stop_request.read_reason(run_dir)
    except (OSError, ValueError, KeyError):  # a file system that fails while Slurm ends the job
        reason = None
    if reason is None:
        return "killed", "the job was cancelled"
    if reason == "time_limit":
        return "timeout", "the job reached its time limit"
    return "preempted", "the job was preempted by another job"


def _stop_request_handler(run_dir: Path, job: Job) -> Callable[[int, FrameType | None], None]:
    """Return the handler of the signal that Slurm sends before it ends a job."""

    def handle(number: int, frame: FrameType | None) -> None:
        if job.node == 0:
            left = minutes_left(job.id)
            margin = RunSpec.read(run_dir).config.cluster.signal_delay_s / 60 + TIME_LIMIT_MARGIN_MIN
            reason = "time_limit" if left is not None and left <= margin else "preemption"
            stop_request.request_stop(run_dir, reason)

    return handle


def _write_no_rendezvous(run_dir: Path, job: Job, error: TimeoutError) -> int:
    """Write the error of a node that could not reach the head.

    The result is the exit code of the node.
    """
    write_error(agent_error_path(run_dir, job.node), RunError("NoRendezvous", str(error), "setup"))
    return 1


if __name__ == "__main__":
    main()

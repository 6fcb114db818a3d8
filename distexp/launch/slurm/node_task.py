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
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from distexp.launch import failures, outcome
from distexp.launch.agent import NodeContext, StoppedError, raise_stopped, run_node, write_start_error
from distexp.launch.failures import STOPPED_CODE
from distexp.launch.slurm.client import minutes_left
from distexp.launch.slurm.peers import Job, Peers, SupersededError, requeue_if_needed, write_exit_status
from distexp.runs import run_state, texts
from distexp.runs.record import RunRecord
from distexp.runs.spec import RunSpec
from distexp.system import cgroups, processes
from distexp.tracking.base import tracked

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


if __name__ == "__main__":
    main()

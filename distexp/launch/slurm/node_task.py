"""One node of a job: ``srun python -m distexp.launch.slurm.node_task ARRAY.json``, the agent of its node.

The head's task settles the run's record after all nodes have told in a file how they ended, and its exit
code is the job's, so that Slurm's own accounting says FAILED of a run that failed.
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

from distexp.checkpoints.folder import in_run, step_of
from distexp.launch import oom
from distexp.launch.agent import NodeContext, StoppedError, run_node, stop
from distexp.launch.outcome import STOPPED_CODE, finalize_run, start_attempt
from distexp.launch.rendezvous import read_rendezvous
from distexp.launch.slurm.client import SlurmError, minutes_left, requeue, states
from distexp.runs import stop_request
from distexp.runs.record import RunError, RunRecord, write_json
from distexp.runs.run_dir import agent_error_path, exit_status_path
from distexp.runs.spec import RunSpec
from distexp.system.processes import NOTICE_SIGNAL
from distexp.tracking.process import tracked

LOOK_S = 0.5
DONE_WAIT_S, STOPPED_WAIT_S, REQUEUE_S = 60.0, 6.0, 30.0
MARGIN_MIN = 1.5


@dataclass(frozen=True)
class Job:
    """What Slurm tells a task of its job."""

    id: str
    attempt: str
    node: int
    hosts: list[str]

    @classmethod
    def from_environment(cls) -> Job:
        """From Slurm's variables; the last element of an array has the array's own SLURM_JOB_ID."""
        variables = os.environ
        job = f"{variables['SLURM_ARRAY_JOB_ID']}_{variables['SLURM_ARRAY_TASK_ID']}"
        return cls(
            id=job,
            attempt=f"{job}.{variables.get('SLURM_RESTART_COUNT', '0')}",
            node=int(variables["SLURM_PROCID"]),
            hosts=list(submitit.JobEnvironment().hostnames),
        )


def own_address() -> str:
    """This node's name as Slurm has it, under which other nodes find it; its hostname where that has no address."""
    name = os.environ.get("SLURMD_NODENAME", "")
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return socket.gethostname()
    return name or socket.gethostname()


class SupersededError(BaseException):
    """A later attempt has begun; not an Exception, so that nothing takes it for an error."""


@dataclass
class Others:
    """The agents of the other nodes, by the files in which they tell how they ended."""

    run_dir: Path
    job: Job
    nodes: int
    looked: float = 0.0
    begun: bool = False  # whether the head has told that this attempt has
    codes: dict[int, int] = field(default_factory=dict)

    def look(self) -> None:
        """Reads what has been told since the last call."""
        for node in set(range(self.nodes)) - {self.job.node} - set(self.codes):
            try:
                told = json.loads(exit_status_path(self.run_dir, node).read_text())
            except (OSError, ValueError):
                continue
            if told["attempt"] == self.job.attempt:
                self.codes[node] = told["code"]

    def lost(self) -> bool:
        """Whether one has ended badly; looks twice a second, for a network's file system counts every look.

        Raises SupersededError where a later attempt has begun.
        """
        if time.monotonic() - self.looked > LOOK_S:
            self.looked = time.monotonic()
            self.check_latest()
            if self.nodes > 1:
                self.look()
        return any(self.codes.values())

    def check_latest(self) -> None:
        """Raises SupersededError where Slurm, cut off from this attempt, has begun another in the same directory."""
        latest = read_rendezvous(self.run_dir)
        if latest is not None and latest.attempt == self.job.attempt:
            self.begun = True
        elif latest is not None and self.begun:
            raise SupersededError(f"{self.job.attempt} was given up by Slurm, and {latest.attempt} has begun")

    def await_all(self, seconds: float) -> dict[int, int]:
        """Everyone's exit code; an agent that says nothing was killed, or its node is gone."""
        deadline = time.monotonic() + seconds
        self.look()
        while self.silent() and time.monotonic() < deadline:
            time.sleep(0.1)
            self.look()
        return self.codes | dict.fromkeys(self.silent(), -int(signal.SIGKILL))

    def silent(self) -> set[int]:
        """The nodes that have not told how they ended."""
        return set(range(self.nodes)) - {self.job.node} - set(self.codes)


def main() -> None:
    """Runs a node to its end; the head's exit code is 0 where the run completed."""
    try:
        sys.exit(run_task())
    except SupersededError as error:
        sys.exit(f"{error}: this one ends, and leaves no record")


def run_task() -> int:
    """A node's part of a job, as its exit code."""
    started, job = time.time(), Job.from_environment()
    listed = Path(sys.argv[1])
    directory = json.loads(listed.read_text())["directories"][int(os.environ["SLURM_ARRAY_TASK_ID"])]
    run_dir = listed.parent.parent / directory
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(NOTICE_SIGNAL, _noticing(run_dir, job))
    spec = RunSpec.read(run_dir)
    others = Others(run_dir, job, spec.nodes)
    if job.node != 0:
        attempt(spec, run_dir, job, others, started)
        return 0
    with tracked(spec, run_dir) as tracking:
        code = attempt(spec, run_dir, job, others, started)
        record = conclude(spec, run_dir, code, others, started)
    print(f"{run_dir}: {record.status}" + (f": {record.error.message}" if record.error else ""), flush=True)
    for sentence in tracking.told:
        print(sentence, flush=True)
    if starts_again(spec, run_dir, job, record, lost=bool(others.silent())):
        time.sleep(REQUEUE_S)  # Slurm ends this process
    return 0 if record.status == "completed" else 1


def starts_again(spec: RunSpec, run_dir: Path, job: Job, record: RunRecord, *, lost: bool) -> bool:
    """Whether Slurm was asked to start anew a run that had to end, or ``lost`` a node, and left a checkpoint.

    Slurm itself does so once it has noticed that a node is gone, which may be after the head's end. A run that
    came no further than the attempt before would come no further the next time.
    """
    had_to_end = record.status == "preempted" or (lost and record.status == "killed")
    if not had_to_end or not spec.config.cluster.requeue:
        return False
    newest = next((step for path in in_run(run_dir) if (step := step_of(path)) is not None), 0)
    before = record.run.attempts[-1]["resumed_from_step"] or 0
    if newest <= before:
        print(f"not started again: this attempt began at step {before} and left no later checkpoint", flush=True)
        return False
    try:
        if lost and not _runs(job):
            return False  # it was cancelled, or Slurm starts it again by itself
        requeue(job.id)
    except SlurmError as error:
        print(f"not started again: {error}", flush=True)
        return False
    print(f"started again by Slurm as {job.id}, from step {newest}", flush=True)
    return True


def _runs(job: Job) -> bool:
    """Whether Slurm has nothing else in mind with a job than to run it."""
    now = states([job.id]).get(job.id)
    return now is not None and now.state == "RUNNING"


def attempt(spec: RunSpec, run_dir: Path, job: Job, others: Others, started: float) -> int:
    """This node's part of a run; its exit code, which the other nodes are told."""
    code = STOPPED_CODE
    try:
        if job.node == 0:
            start_attempt(spec, run_dir, job.id, job.hosts)
            oom.save_counters(run_dir)
        code = run_node(spec, run_dir, NodeContext(job.node, own_address(), job.attempt, others.lost), started)
    except StoppedError:
        pass
    except TimeoutError as error:
        code = _no_head(run_dir, job, error)
    others.check_latest()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell(run_dir, job, code)
    return code


def tell(run_dir: Path, job: Job, code: int) -> None:
    """Leaves word for the other nodes how this one ended."""
    path = exit_status_path(run_dir, job.node)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"attempt": job.attempt, "code": code})


def conclude(spec: RunSpec, run_dir: Path, code: int, others: Others, started: float) -> RunRecord:
    """The head's last act: the record."""
    codes = {0: code, **others.await_all(STOPPED_WAIT_S if code == STOPPED_CODE else DONE_WAIT_S)}
    if code != STOPPED_CODE:
        return finalize_run(spec, run_dir, codes, started)
    silent = [node for node, other in codes.items() if other == -signal.SIGKILL]
    if silent:
        return finalize_run(spec, run_dir, codes, started, f"node {silent[0]} is gone, and Slurm ended the job")
    status, why = told_to_end(run_dir)
    return finalize_run(spec, run_dir, codes, started, why, stopped_status=status)


def told_to_end(run_dir: Path) -> tuple[str, str]:
    """Status and reason of a run that Slurm told to end."""
    try:
        reason = json.loads((run_dir / stop_request.FILE).read_text())["reason"]
    except (OSError, ValueError, KeyError):
        return "killed", "the job was cancelled"
    if reason == "time_limit":
        return "timeout", "the job's time limit was reached"
    return "preempted", "the job had to give way to another one"


def _noticing(run_dir: Path, job: Job) -> Callable[[int, FrameType | None], None]:
    """A handler of Slurm's early word that the job will have to end."""

    def answer(number: int, frame: FrameType | None) -> None:
        if job.node == 0:
            left = minutes_left(job.id)
            margin = RunSpec.read(run_dir).config.cluster.signal_delay_s / 60 + MARGIN_MIN
            reason = "time_limit" if left is not None and left <= margin else "preemption"
            stop_request.request_stop(run_dir, reason)

    return answer


def _no_head(run_dir: Path, job: Job, error: TimeoutError) -> int:
    path = agent_error_path(run_dir, job.node)
    path.parent.mkdir(parents=True, exist_ok=True)
    cause = RunError("NoRendezvous", str(error), "setup")
    write_json(path, {"unix_time_s": time.time(), **vars(cause)})
    return 1


if __name__ == "__main__":
    main()

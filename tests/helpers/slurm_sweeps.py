"""Helpers for tests that run sweeps on the test cluster.

The data sets of ``SLOW`` are slow on purpose: each test has time to interrupt the run, at little CPU load. If the time
might not be enough on a busy machine, the workers wait after 40 steps until a file exists, the gate.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from distexp.launch import run_dirs
from distexp.runs.record import RunRecord, RunSpec
from tests.helpers.processes import find_processes
from tests.helpers.runs import HELPERS, REPOSITORY, run_distexp, run_module
from tests.helpers.slurm_cluster import Cluster

SLOW = (
    "model=gpt_tiny",
    "strategy=single",
    "cluster.device=cpu",
    "cluster.cpus_per_worker=1",
    "dataset._target_=failing_runs.slow",
    "dataset.keys=[train_size,eval_size,max_length,padding,num_workers,options]",
    "trusted_packages=[failing_runs]",
    "dataset.train_size=64",
    "dataset.eval_size=8",
    "train.micro_batch_size=4",  # 0.1 s a step
    "train.gradient_accumulation_steps=1",
    "train.num_epochs=10000",
    "train.log_every=1",
)
STEPS_BEFORE_THE_GATE = 40
NO_WAIT = ("--multirun", "cluster=slurm", "cluster.wait=false")


def read_record(sweep: Path, number: int) -> RunRecord:
    """Return the record of a run."""
    return RunRecord.read(sweep / str(number) / "record.json")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a JSON lines file; empty if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def latest_jobs(sweep: Path) -> list[str]:
    """Return the latest job of each run, in the order of their numbers."""
    return [entry.job or "" for _, entry in sorted(run_dirs.latest(sweep).items())]


def status(slurm: Cluster, sweep: Path, cwd: Path | None = None) -> str:
    """Return the output of the status command."""
    done = run_module("distexp.status", str(sweep), env=slurm.env, cwd=cwd or REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def user_environment(slurm: Cluster) -> dict[str, str]:
    """Return the environment of a user with the custom data sets of ``failing_runs``."""
    return {**slurm.env, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(HELPERS)])}


def wait_for(condition: Callable[[], bool], seconds: float = 600) -> None:
    """Wait until a condition is true, and fail after a time that only a broken program needs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        asked = time.monotonic()
        if condition():
            return
        time.sleep(max(0.2, time.monotonic() - asked))  # so that a command takes at most half of the time
    raise AssertionError(f"condition still false after {seconds:g} s")


def all_ended(slurm: Cluster, sweep: Path) -> Callable[[], bool]:
    """Return a condition: status shows no run that may still be active."""

    def ended() -> bool:
        shown = status(slurm, sweep)  # once, because a run may change its state between two commands
        return not any(state in shown for state in ("pending", "running", "ending", "unknown"))

    return ended


def wait_requeued(slurm: Cluster, job: str) -> None:
    """Wait until Slurm has requeued a job. Slurm starts it ``REQUEUE_DELAY_S`` later."""
    query = f"squeue -h -j {job} -o %T:%r".split()
    wait_for(lambda: slurm.command(*query).strip() == "PENDING:BeginTime")


def restart_now(slurm: Cluster, job: str) -> None:
    """Wait until Slurm has requeued a job, and start it at once."""
    wait_requeued(slurm, job)
    start_now(slurm, job)


def start_now(slurm: Cluster, job: str) -> None:
    """Start a requeued job at once."""
    slurm.command("scontrol", "update", f"jobid={job}", "StartTime=now")


def node_tasks(sweep: Path, node: str) -> list[psutil.Process]:
    """Return the running node tasks of a sweep on one node of their job."""
    found = [
        process
        for process in find_processes("distexp.launch.slurm.node_task", str(sweep))
        if "srun" not in process.info["cmdline"][0] and _variable(process, "SLURM_PROCID") == node
    ]
    # A task that starts a program is copied, with its command line, until the copy becomes the program.
    ids = {process.pid for process in found}
    return [process for process in found if _parent(process) not in ids]


def _variable(process: psutil.Process, name: str) -> str | None:
    try:
        return process.environ().get(name)
    except psutil.NoSuchProcess:
        return None


def _parent(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return None


def gated(*gates: Path, steps: int = STEPS_BEFORE_THE_GATE) -> tuple[str, ...]:
    """Return overrides of runs that wait after some steps of each attempt until their gate exists."""
    return f"+dataset.options.gate={','.join(map(str, gates))}", f"+dataset.options.at={4 * steps}"


def submit(slurm: Cluster, sweep: Path, *overrides: str) -> None:
    """Submit a sweep of slow trainings without waiting for it."""
    done = run_distexp(*NO_WAIT, *SLOW, *overrides, f"hydra.sweep.dir={sweep}", env=user_environment(slurm))
    assert done.returncode == 0, done.stdout + done.stderr


def logged_steps(sweep: Path, number: int = 0) -> int:
    """Return the number of steps that a run has logged."""
    return len(read_lines(sweep / str(number) / "metrics.jsonl"))


def assert_all_steps(sweep: Path, number: int, last: int) -> None:
    """Assert that every step up to the last is logged exactly once."""
    assert [line["step"] for line in read_lines(sweep / str(number) / "metrics.jsonl")] == list(range(1, last + 1))


def hosts(sweep: Path) -> list[str]:
    """Return the nodes of the latest attempt of run 0."""
    found: list[str] = RunSpec.read(sweep / "0").run.attempts[-1]["hosts"]
    return found

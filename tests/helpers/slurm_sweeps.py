"""Helpers for tests that run sweeps on the test cluster."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from distexp.launch import ledger
from distexp.runs.record import RunRecord
from tests.helpers.processes import find_processes
from tests.helpers.runs import HELPERS, REPOSITORY, run_module
from tests.helpers.slurm_cluster import Cluster


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
    return [entry.job or "" for _, entry in sorted(ledger.latest(sweep).items())]


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
        if condition():
            return
        time.sleep(0.2)
    raise AssertionError(f"condition still false after {seconds:g} s")


def all_ended(slurm: Cluster, sweep: Path) -> Callable[[], bool]:
    """Return a condition: status shows no run that may still be active."""

    def ended() -> bool:
        shown = status(slurm, sweep)  # once, because a run may change its state between two commands
        return not any(state in shown for state in ("pending", "running", "ending", "unknown"))

    return ended


def wait_requeued(slurm: Cluster, job: str) -> None:
    """Wait until Slurm has requeued a job. Slurm starts it two minutes later."""
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

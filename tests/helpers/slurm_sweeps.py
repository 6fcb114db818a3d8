"""Helpers for tests that run sweeps on the test cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from distexp.launch import ledger
from distexp.runs.record import RunRecord
from tests.helpers.runs import REPOSITORY, run_module
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


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Wait until a condition is true, and fail after the given time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.2)
    raise AssertionError(f"condition still false after {seconds:g} s")


def all_ended(slurm: Cluster, sweep: Path) -> Callable[[], bool]:
    """Return a condition: status shows no run that may still be active."""
    return lambda: not any(state in status(slurm, sweep) for state in ("pending", "running", "ending", "unknown"))


def restart_now(slurm: Cluster, job: str) -> None:
    """Wait until Slurm has requeued a job, and start it at once.

    Slurm itself would wait for two minutes.
    """
    query = f"squeue -h -j {job} -o %T:%r".split()
    wait_for(lambda: slurm.command(*query).strip() == "PENDING:BeginTime", 240)
    slurm.command("scontrol", "update", f"jobid={job}", "StartTime=now")


def node_tasks(sweep: Path, node: str) -> list[psutil.Process]:
    """Return the running node tasks of a sweep on one node of their job."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        is_task = "distexp.launch.slurm.node_task" in command and any(str(sweep) in argument for argument in command)
        if is_task and "srun" not in command[0] and process.environ().get("SLURM_PROCID") == node:
            found.append(process)
    return found

"""One run from spec to record: agents start, are watched, and leave exactly one record behind."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from distexp.hardware import cpu_count
from distexp.launch.logs import node_logs
from distexp.launch.processes import end_tree, start_module
from distexp.results import RECORD, Environment, RunError, RunInfo, RunRecord
from distexp.screen import Screen
from distexp.spec import RunSpec

POLL_S = 0.1
AGENT_GRACE_S = 8.0


def run_job_to_record(spec: RunSpec, directory: Path, screen: Screen) -> RunRecord:
    """Runs a spec on this machine, each node by an agent of its own, and returns its record."""
    started = time.time()
    spec.write(directory)
    agents = [
        start_module("distexp.launch.agent", str(directory), str(node), env=os.environ)
        for node in range(spec.nodes)
    ]
    try:
        with screen.follow(spec, directory) as live:
            failed = _watch(agents, live.refresh)
    except KeyboardInterrupt:
        _end(agents)
        error = RunError("KeyboardInterrupt", "stopped from the keyboard")
        failed_record(spec, directory, "killed", error, started).write(directory)
        raise
    finally:
        _end(agents)
    if failed or not (directory / RECORD).exists():
        codes = [agent.returncode for agent in agents]
        record = failed_record(spec, directory, "failed", root_cause(directory, codes), started)
        record.write(directory)
    record = RunRecord.read(directory / RECORD)
    screen.done(record, directory)
    return record


def _watch(agents: Sequence[subprocess.Popen[bytes]], refresh: Any) -> bool:
    """Waits until all agents have ended well, or one has not; whether one has not."""
    while True:
        codes = [agent.poll() for agent in agents]
        refresh()
        if any(code not in (None, 0) for code in codes):
            return True
        if all(code == 0 for code in codes):
            return False
        time.sleep(POLL_S)


def _end(agents: Sequence[subprocess.Popen[bytes]]) -> None:
    for agent in agents:
        end_tree(agent, AGENT_GRACE_S)


def root_cause(directory: Path, codes: Sequence[int | None]) -> RunError:
    """The first error that a rank wrote down; what broke later broke because of it."""
    found = []
    for path in directory.glob("logs/node*/rank*.error.json"):
        found.append(json.loads(path.read_text()))
    if not found:
        tail = _tail(node_logs(directory, 0) / "torchrun.log")
        return RunError("WorkerDied", f"the agents ended with {list(codes)} and no rank said why{tail}")
    first = min(found, key=lambda error: error["unix_time_s"])
    del first["unix_time_s"]
    return RunError(**first)


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return f"; torchrun said: {lines[-1]}" if lines else ""


def failed_record(spec: RunSpec, directory: Path, status: str, error: RunError, started: float) -> RunRecord:
    """The record of a run whose workers could not write it."""
    run = spec.run
    run.started_at = datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds")
    run.duration_s = time.time() - started
    run.hosts = [socket.gethostname()]
    return RunRecord(
        status=status, run=run, config=asdict(spec.config), error=error, environment=bare_environment()
    )


def invalid_record(run: RunInfo, config: dict[str, Any], faults: list[str]) -> RunRecord:
    """The record of a cell that cannot run."""
    return RunRecord(
        status="invalid",
        run=run,
        config=config,
        error=RunError("ConfigError", " | ".join(faults)),
        environment=bare_environment(),
    )


def bare_environment() -> Environment:
    """The machine, as far as it shows without torch."""
    return Environment(python=platform.python_version(), cpu_count=cpu_count(), hostname=socket.gethostname())

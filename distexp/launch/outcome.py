"""What became of a run: its true cause, and the record that says so.

The agents' exit codes, the errors that ranks wrote down, torchrun's account of who died first, and the
kernel's count of processes that it killed for memory are put together here. Whoever outlives a run
calls ``finalize_run``: the launcher as a rule, the head's agent when the launcher is gone.
"""

from __future__ import annotations

import json
import platform
import re
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from distexp.launch.oom import oom_killed
from distexp.measure.memory.summary import energy_j, run_traces, summarize_run
from distexp.runs import attempts
from distexp.runs.events import last_value
from distexp.runs.phases import read_phase_events
from distexp.runs.record import RECORD, Environment, RunError, RunInfo, RunRecord
from distexp.runs.spec import RunSpec
from distexp.system.hardware import cpu_count, visible_gpus

TIMEOUT_CODE = 124
HANG_CODE = 75
STOPPED_CODE = 128 + signal.SIGTERM

PREFLIGHT = "preflight.json"
DISK_RESERVE = ".reserve"
DISK_RESERVE_BYTES = 256 * 1024
"""Kept on the disk while a run goes on, so that a full one still takes its record."""

PEER_LOSS = re.compile(
    r"connection (reset|closed|refused|was)|closed by peer|broken pipe|socket|timed? ?out|DistBackendError|NCCL",
    re.IGNORECASE,
)
"""What a rank says when another one has gone."""

FAILURE = re.compile(r"^\s*rank\s*:\s*(\d+) \(local_rank: \d+\)\s*^\s*exitcode\s*:\s*(-?\d+)", re.MULTILINE)
"""A rank and its exit code in torchrun's closing account."""

GPU_OOM = re.compile(r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory")
HOST_OOM = re.compile(r"^MemoryError|can't allocate memory|Cannot allocate memory|std::bad_alloc|\[Errno 12\]")


def start_attempt(spec: RunSpec, directory: Path, job_id: str | None = None, hosts: Sequence[str] = ()) -> None:
    """Begins an attempt: writes what it starts from, and holds the room for its record."""
    attempts.register_attempt(spec.run, directory, job_id, list(hosts) or [socket.gethostname()])
    spec.write(directory)
    (directory / DISK_RESERVE).write_bytes(b"\0" * DISK_RESERVE_BYTES)


def finalize_run(
    spec: RunSpec,
    directory: Path,
    codes: Mapping[int, int],
    started: float,
    stopped: str | None = None,
    *,
    stopped_status: str = "killed",
) -> RunRecord:
    """Completes the record that rank 0 wrote, or writes the one that it could not, and returns it.

    Args:
        codes: each node's exit code, of its agent.
        started: Unix time in seconds.
        stopped: why the run was ended from outside, where it was; it then has ``stopped_status``.
    """
    (directory / DISK_RESERVE).unlink(missing_ok=True)
    complete = (directory / RECORD).exists() and all(code == 0 for code in codes.values())
    if complete:
        record = RunRecord.read(directory / RECORD)
    elif stopped is not None:
        error = RunError("Stopped", stopped, current_phase(directory))
        record = failed_record(spec, directory, stopped_status, error, started)
    else:
        status, error = classify_failure(directory, codes, spec)
        record = failed_record(spec, directory, status, error, started)
    add_traces(record, spec, directory)
    attempts.finalize(record)
    record.write(directory)
    return record


def classify_failure(directory: Path, codes: Mapping[int, int], spec: RunSpec) -> tuple[str, RunError]:
    """The status of a run that did not complete by itself, and its cause."""
    phase = current_phase(directory)
    cluster = spec.config.cluster
    if TIMEOUT_CODE in codes.values():
        limit = f"cluster.timeout_min={cluster.timeout_min:g} was over"
        return "timeout", RunError("Timeout", limit, phase)
    if HANG_CODE in codes.values():
        idle = (
            f"no step and no new phase for cluster.hang_timeout_min={cluster.hang_timeout_min:g}: "
            "the stacks of all ranks are in their logs"
        )
        return "failed", RunError("Hang", idle, phase)
    dead_agents = {node: code for node, code in codes.items() if code < 0}
    if dead_agents:
        node, code = next(iter(dead_agents.items()))
        return _by_signal(directory, -code, f"the agent of node {node}", phase, None)
    return _worker_error(directory, phase)


def _worker_error(directory: Path, phase: str | None) -> tuple[str, RunError]:
    """From what the ranks wrote down and torchrun saw: the first cause, and not its victims."""
    told = read_rank_errors(directory)
    died = signal_deaths(directory)
    if died and (not told or PEER_LOSS.search(told[0].message) or PEER_LOSS.search(told[0].type)):
        rank, number = died[0]
        return _by_signal(directory, number, f"rank {rank}", phase, rank)
    if not told:
        return "failed", RunError("WorkerDied", f"no rank said why{_torchrun_said(directory)}", phase)
    first = told[0]
    text = f"{first.type}: {first.message}"
    if GPU_OOM.search(text):
        return "oom_gpu", first
    if HOST_OOM.search(text) or HOST_OOM.search(first.message) or first.type == "MemoryError":
        return "oom_host", first
    return "failed", first


def _by_signal(directory: Path, number: int, who: str, phase: str | None, rank: int | None) -> tuple[str, RunError]:
    name = signal.Signals(number).name
    if number == signal.SIGKILL and oom_killed(directory):
        message = f"{who} was killed by the kernel, which was out of memory"
        return "oom_host", RunError("OutOfMemoryKilled", message, phase, rank)
    status = "killed" if number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT) else "failed"
    return status, RunError(name, f"{who} was ended by {name}", phase, rank)


def read_rank_errors(directory: Path) -> list[RunError]:
    """The errors that ranks and agents wrote down, in the order of time."""
    found = []
    for path in directory.glob("logs/node*/*.error.json"):
        try:
            found.append(json.loads(path.read_text()))
        except ValueError:
            continue  # torn by the death of its rank; its log has the rest
    found.sort(key=lambda error: float(error.pop("unix_time_s")))
    return [RunError(**error) for error in found]


def signal_deaths(directory: Path) -> list[tuple[int, int]]:
    """(rank, signal) of workers that died by a signal, by torchrun's account, SIGTERM of its own left out."""
    found = []
    for path in sorted(directory.glob("logs/node*/torchrun.log")):
        text = path.read_text(errors="replace")
        root = text.find("Root Cause")
        for part in (text[root:], text[:root]) if root >= 0 else ():
            for rank, code in FAILURE.findall(part):
                if int(code) < 0 and -int(code) != signal.SIGTERM:
                    found.append((int(rank), -int(code)))
    return found


def _torchrun_said(directory: Path) -> str:
    for path in sorted(directory.glob("logs/node*/torchrun.log")):
        lines = [line for line in path.read_text(errors="replace").splitlines() if "Error" in line]
        if lines:
            return f"; torchrun said: {lines[-1].strip()}"
    return ""


def current_phase(directory: Path) -> str | None:
    """The last phase that rank 0 marked."""
    marks = read_phase_events(directory / "events.jsonl")
    return marks[-1].phase if marks else None


def failed_record(spec: RunSpec, directory: Path, status: str, error: RunError, started: float | None) -> RunRecord:
    """The record of a run whose workers could not write it; ``started`` is None for one that never began."""
    run = spec.run
    if started is not None:
        run.started_at = datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds")
        run.duration_s = time.time() - started
        run.hosts = run.attempts[-1]["hosts"] if run.attempts else [socket.gethostname()]
        attempts.record_resume_step(run, last_value(directory, "resumed_from_step"))
    record = RunRecord(
        status=status, run=run, config=asdict(spec.config), error=error, environment=launcher_environment()
    )
    record.memory["torch"] = _torch_memory(directory)
    return record


def invalid_record(run: RunInfo, config: dict[str, Any], errors: list[str]) -> RunRecord:
    """The record of a cell that cannot run."""
    return RunRecord(
        status="invalid",
        run=run,
        config=config,
        error=RunError("ConfigError", " | ".join(errors), errors=errors),
        environment=launcher_environment(),
    )


def launcher_environment() -> Environment:
    """The machine, as far as it shows without torch."""
    gpu = next(iter(visible_gpus()), None)
    return Environment(
        python=platform.python_version(),
        gpu_name=gpu.name if gpu else None,
        gpu_total_mib=gpu.total_mib if gpu else None,
        cpu_count=cpu_count(),
        hostname=socket.gethostname(),
    )


def add_traces(record: RunRecord, spec: RunSpec, directory: Path) -> None:
    """The summaries of what the agents sampled, and what was measured before the training."""
    if (directory / PREFLIGHT).exists():
        record.preflight = json.loads((directory / PREFLIGHT).read_text())
    if not spec.config.measure.enabled:
        return
    summary = summarize_run(directory, spec.nodes)
    record.memory.update(summary.memory)
    record.utilization.update(summary.utilization)
    joules = energy_j(run_traces(directory, spec.nodes), directory / "events.jsonl")
    samples = last_value(directory, "measured_samples")
    if joules is not None and samples:
        record.metrics.energy_j_per_sample = joules / samples


def _torch_memory(directory: Path) -> list[dict[str, Any]]:
    """What each rank's allocator said when its rank failed."""
    return [json.loads(path.read_text()) for path in sorted(directory.glob("logs/node*/rank*.memory.json"))]

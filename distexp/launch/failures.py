"""Cause of a failed run, found from exit codes, error files, torchrun's log and the kernel's OOM counters."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from pathlib import Path

from distexp.launch.oom import oom_killed
from distexp.runs.errors import read_rank_errors
from distexp.runs.phases import read_phase_events
from distexp.runs.record import RunError
from distexp.runs.run_dir import EVENTS, torchrun_log_paths
from distexp.runs.spec import RunSpec

TIMEOUT_CODE = 124
HANG_CODE = 75
STOPPED_CODE = 128 + signal.SIGTERM

PEER_LOSS = re.compile(
    r"connection (reset|closed|refused|was)|closed by peer|broken pipe|socket|timed? ?out|DistBackendError|NCCL",
    re.IGNORECASE,
)
"""Errors of a rank whose peer has died."""

FAILURE = re.compile(r"^\s*rank\s*:\s*(\d+) \(local_rank: \d+\)\s*^\s*exitcode\s*:\s*(-?\d+)", re.MULTILINE)
"""A rank and its exit code in torchrun's summary of failures."""

GPU_OOM = re.compile(r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory")
HOST_OOM = re.compile(r"^MemoryError|can't allocate memory|Cannot allocate memory|std::bad_alloc|\[Errno 12\]")

Cause = tuple[str, RunError]
"""Status of a run, and its error."""


def classify_failure(directory: Path, codes: Mapping[int, int], spec: RunSpec) -> Cause:
    """Return the status of a run that did not complete, and its cause.

    Args:
        directory: Directory of the run.
        codes: Exit code of each node's agent.
        spec: The run.
    """
    phase, cluster = current_phase(directory), spec.config.cluster
    if TIMEOUT_CODE in codes.values():
        limit = f"the run took longer than cluster.timeout_min={cluster.timeout_min:g}"
        return "timeout", RunError("Timeout", limit, phase)
    if HANG_CODE in codes.values():
        idle = (
            f"no step or new phase within cluster.hang_timeout_min={cluster.hang_timeout_min:g}: "
            "the stacks of all ranks are in logs/node*/rank*.log"
        )
        return "failed", RunError("Hang", idle, phase)
    dead_agents = {node: code for node, code in codes.items() if code < 0}
    if dead_agents:
        node, code = next(iter(dead_agents.items()))
        return _signal_cause(directory, -code, f"the agent of node {node}", phase, None)
    return _worker_cause(directory, phase)


def _worker_cause(directory: Path, phase: str | None) -> Cause:
    """Find the first error of a worker. Later ones are its consequences."""
    errors = read_rank_errors(directory)
    deaths = signal_deaths(directory)
    if deaths and (not errors or PEER_LOSS.search(errors[0].message) or PEER_LOSS.search(errors[0].type)):
        rank, number = deaths[0]
        return _signal_cause(directory, number, f"rank {rank}", phase, rank)
    if not errors:
        return "failed", RunError("WorkerDied", f"no rank reported an error{_torchrun_error(directory)}", phase)
    first = errors[0]
    text = f"{first.type}: {first.message}"
    if GPU_OOM.search(text):
        return "oom_gpu", first
    if HOST_OOM.search(text) or HOST_OOM.search(first.message) or first.type == "MemoryError":
        return "oom_host", first
    return "failed", first


def _signal_cause(directory: Path, number: int, process: str, phase: str | None, rank: int | None) -> Cause:
    name = signal.Signals(number).name
    if number == signal.SIGKILL and oom_killed(directory):
        message = f"the kernel ran out of memory and killed {process}"
        return "oom_host", RunError("OutOfMemoryKilled", message, phase, rank)
    status = "killed" if number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT) else "failed"
    return status, RunError(name, f"{process} was terminated by {name}", phase, rank)


def signal_deaths(directory: Path) -> list[tuple[int, int]]:
    """Return (rank, signal) of the workers that died by a signal, the root cause first.

    The source is torchrun's log. SIGTERM is left out, because torchrun sends it to the other workers.
    """
    found = []
    for path in torchrun_log_paths(directory):
        text = path.read_text(errors="replace")
        root = text.find("Root Cause")
        for part in (text[root:], text[:root]) if root >= 0 else ():
            for rank, code in FAILURE.findall(part):
                if int(code) < 0 and -int(code) != signal.SIGTERM:
                    found.append((int(rank), -int(code)))
    return found


def _torchrun_error(directory: Path) -> str:
    for path in torchrun_log_paths(directory):
        lines = [line for line in path.read_text(errors="replace").splitlines() if "Error" in line]
        if lines:
            return f"; torchrun printed: {lines[-1].strip()}"
    return ""


def current_phase(directory: Path) -> str | None:
    """Return the latest phase of a run, or None."""
    events = read_phase_events(directory / EVENTS)
    return events[-1].phase if events else None

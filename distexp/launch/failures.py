"""Cause of a failed run, found from exit codes, the ends of workers, error files and the kernel's OOM counters."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distexp.launch.hang import hang_error
from distexp.launch.oom import oom_killed
from distexp.runs.errors import read_rank_errors
from distexp.runs.phases import read_phase_events
from distexp.runs.record import RunError
from distexp.runs.run_dir import EVENTS, worker_exits_paths
from distexp.runs.spec import RunSpec

TIMEOUT_CODE = 124
HANG_CODE = 75
SIGNAL_CODE = 128
"""Exit code of an agent is this plus N if signal N ended the parent process of its workers."""
TERMINATED_CODE = 76
"""Exit code of an agent if the parent process of its workers got SIGTERM from outside."""
STOPPED_CODE = SIGNAL_CODE + signal.SIGTERM
"""Exit code of an agent that got SIGTERM itself."""

PEER_LOSS = re.compile(
    r"connection (reset|closed|refused|was)|closed by peer|broken pipe|socket|timed? ?out|DistBackendError|NCCL",
    re.IGNORECASE,
)
"""Errors of a rank whose peer has died."""

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
        return "failed", hang_error(directory, phase, f"cluster.hang_timeout_min={cluster.hang_timeout_min:g}")
    dead_agents = {node: code for node, code in codes.items() if code < 0}
    if dead_agents:
        node, code = next(iter(dead_agents.items()))
        return _signal_cause(directory, -code, f"the agent of node {node}", phase, None)
    for node, code in codes.items():
        number = signal.SIGTERM if code == TERMINATED_CODE else code - SIGNAL_CODE
        if number > 0 and code != STOPPED_CODE:
            parent = f"the parent process of the workers on node {node}"
            return _signal_cause(directory, number, parent, phase, None)
    return _worker_cause(directory, phase)


def _worker_cause(directory: Path, phase: str | None) -> Cause:
    """Find the first error of a worker. Later ones are its consequences."""
    errors = read_rank_errors(directory)
    deaths = signal_deaths(directory)
    if deaths and (not errors or PEER_LOSS.search(errors[0].message) or PEER_LOSS.search(errors[0].type)):
        rank, number = deaths[0]
        return _signal_cause(directory, number, f"rank {rank}", phase, rank)
    if not errors:
        return _silent_cause(directory, phase)
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


def _silent_cause(directory: Path, phase: str | None) -> Cause:
    """Return the cause of a run whose workers failed without reporting an error."""
    codes = ", ".join(f"rank {end['rank']}: {end['code']}" for end in worker_ends(directory) if end["code"])
    message = f"no rank reported an error (exit codes: {codes or 'none'}): see logs/node*/*.log"
    return "failed", RunError("WorkerDied", message, phase)


def signal_deaths(directory: Path) -> list[tuple[int, int]]:
    """Return (rank, signal) of the workers that died by a signal, the first one first.

    Workers that were stopped because another one had failed are left out.
    """
    return [(end["rank"], -end["code"]) for end in worker_ends(directory) if end["code"] < 0 and not end["stopped"]]


def worker_ends(directory: Path) -> list[dict[str, Any]]:
    """Return how the workers of all nodes ended, in the order of time."""
    ends = [end for path in worker_exits_paths(directory) for end in json.loads(path.read_text())]
    return sorted(ends, key=lambda end: float(end["unix_time_s"]))


def current_phase(directory: Path) -> str | None:
    """Return the latest phase of a run, or None."""
    events = read_phase_events(directory / EVENTS)
    return events[-1].phase if events else None

"""Cause of a failed run, found from exit codes, the ends of workers, error files and the kernel's OOM counters."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from distexp.launch.exit_codes import HANG_CODE, TIMEOUT_CODE, decode_group_signal
from distexp.launch.hang import hang_error
from distexp.launch.oom import oom_killed
from distexp.runs.error_files import read_rank_errors
from distexp.runs.out_of_memory import out_of_memory_status
from distexp.runs.phases import read_phase_events
from distexp.runs.record_sections import RunError
from distexp.runs.run_dir import EVENTS, worker_exits_paths
from distexp.runs.spec import RunSpec

PEER_LOSS = re.compile(
    r"connection (reset|closed|refused|was)|closed by peer|broken pipe|socket|timed? ?out|DistBackendError|NCCL",
    re.IGNORECASE,
)
"""Errors of a rank whose peer has died."""


class Cause(NamedTuple):
    """Why a run did not complete.

    Attributes:
        status: Status of the run.
        error: Its error.
    """

    status: str
    error: RunError


class SignalDeath(NamedTuple):
    """A worker that died by a signal."""

    rank: int
    signal: int


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
        return Cause("timeout", RunError("Timeout", limit, phase))
    if HANG_CODE in codes.values():
        error = hang_error(directory, phase, f"cluster.hang_timeout_min={cluster.hang_timeout_min:g}")
        return Cause("failed", error)
    return _parent_cause(directory, codes, phase) or _worker_cause(directory, phase)


def _parent_cause(directory: Path, codes: Mapping[int, int], phase: str | None) -> Cause | None:
    """Return the cause if a signal ended an agent or the parent process of its workers; None if none did."""
    for node, code in codes.items():
        if code < 0:
            return _signal_cause(directory, -code, f"the agent of node {node}", phase)
    for node, code in codes.items():
        number = decode_group_signal(code)
        if number is not None:
            return _signal_cause(directory, number, f"the parent process of the workers on node {node}", phase)
    return None


def _worker_cause(directory: Path, phase: str | None) -> Cause:
    """Return the cause by the first error of a worker. Later errors are its consequences."""
    first = next(iter(read_rank_errors(directory)), None)
    deaths = signal_deaths(directory)
    if deaths and (first is None or _is_peer_loss(first)):
        return _signal_cause(directory, deaths[0].signal, f"rank {deaths[0].rank}", phase, deaths[0].rank)
    if first is None:
        return _silent_cause(directory, phase)
    return Cause(out_of_memory_status(first.type, first.message) or "failed", first)


def _is_peer_loss(error: RunError) -> bool:
    return bool(PEER_LOSS.search(error.message) or PEER_LOSS.search(error.type))


def _signal_cause(directory: Path, number: int, process: str, phase: str | None, rank: int | None = None) -> Cause:
    """Return the cause of a run that ended because a signal ended one of its processes.

    Args:
        directory: Directory of the run.
        number: The signal.
        process: Name of the process, for the message.
        phase: The latest phase of the run, or None.
        rank: Rank of the process; None if it is no worker.
    """
    name = signal.Signals(number).name
    if number == signal.SIGKILL and oom_killed(directory):
        message = f"the kernel ran out of memory and killed {process}"
        return Cause("oom_host", RunError("OutOfMemoryKilled", message, phase, rank))
    status = "killed" if number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT) else "failed"
    return Cause(status, RunError(name, f"{process} was terminated by {name}", phase, rank))


def _silent_cause(directory: Path, phase: str | None) -> Cause:
    """Return the cause of a run whose workers failed without reporting an error."""
    codes = ", ".join(f"rank {end['rank']}: {end['code']}" for end in worker_ends(directory) if end["code"])
    message = f"no rank reported an error (exit codes: {codes or 'none'}): see logs/node*/*.log"
    return Cause("failed", RunError("WorkerDied", message, phase))


def signal_deaths(directory: Path) -> list[SignalDeath]:
    """Return the workers that died by a signal, the first one first.

    Workers that were stopped because another one had failed are left out.
    """
    ends = [end for end in worker_ends(directory) if end["code"] < 0 and not end["stopped"]]
    return [SignalDeath(end["rank"], -end["code"]) for end in ends]


def worker_ends(directory: Path) -> list[dict[str, Any]]:
    """Return how the workers of all nodes ended, in the order of time."""
    ends = [end for path in worker_exits_paths(directory) for end in json.loads(path.read_text())]
    return sorted(ends, key=lambda end: float(end["unix_time_s"]))


def current_phase(directory: Path) -> str | None:
    """Return the latest phase of a run, or None."""
    events = read_phase_events(directory / EVENTS)
    return events[-1].phase if events else None

"""Cause of a hang: the rank that the others wait for.

Every agent looks at its own workers before it ends them, because only a live process can be seen to be stopped. The
process that writes the record combines this with the progress of all ranks.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from distexp.runs.json_files import write_json
from distexp.runs.listing import join_first
from distexp.runs.rank_progress import RankProgress, ranks_behind, read_rank_progress
from distexp.runs.record_sections import RunError
from distexp.runs.run_dir import stopped_ranks_path, stopped_ranks_paths
from distexp.system.process_shutdown import descendants

STACK_DUMP_S = 2.0
"""Time that workers get to write their stacks."""


def inspect_workers(group_pid: int, run_dir: Path, node: int) -> None:
    """Write which workers of a node are stopped by a signal, and make every worker write its stacks to its log.

    Args:
        group_pid: The parent process of the workers.
        run_dir: Directory of the run.
        node: The node.
    """
    workers = descendants(group_pid, recursive=False)
    stopped_pids = {worker.pid for worker in workers if _is_stopped(worker)}
    stopped = [progress.rank for progress in read_rank_progress(run_dir, node) if progress.pid in stopped_pids]
    write_json(stopped_ranks_path(run_dir, node), stopped)
    for worker in workers:
        worker.send_signal(signal.SIGUSR1)
    time.sleep(STACK_DUMP_S)


def hang_error(run_dir: Path, phase: str | None, limit: str) -> RunError:
    """Return the error of a run without progress, with the phase and the rank that the others wait for.

    Args:
        run_dir: Directory of the run.
        phase: The latest phase of rank 0, or None.
        limit: The setting that limits the time without progress.
    """
    progress = read_rank_progress(run_dir)
    stopped = {rank for path in stopped_ranks_paths(run_dir) for rank in json.loads(path.read_text())}
    culprits = [entry for entry in progress if entry.rank in stopped] or ranks_behind(progress)
    message = f"{_describe(culprits, progress, stopped=bool(stopped))}: no step or new phase within {limit}. "
    if not culprits:
        where = phase or (progress[0].phase if progress else "setup")
        return RunError("Hang", f"{message}The stacks of all ranks are in logs/node*/rank*.log", where)
    first = culprits[0]
    return RunError("Hang", f"{message}The stacks of the ranks are in logs/node*/rank*.log", first.phase, first.rank)


def _describe(culprits: Sequence[RankProgress], progress: Sequence[RankProgress], *, stopped: bool) -> str:
    if not progress:
        return "no worker has started"
    if not culprits:
        return "all ranks wait at the same point"
    verb = "is" if len(culprits) == 1 else "are"
    state = "stopped by a signal (SIGSTOP)" if stopped else "behind, and the other ranks wait"
    return f"{join_first(map(str, culprits))} {verb} {state}"


def _is_stopped(worker: psutil.Process) -> bool:
    try:
        return bool(worker.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False

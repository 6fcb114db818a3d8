"""Time limit and hang timeout of a run: the agent of each node watches its workers.

``cluster.timeout_min`` limits a run, from the end of the build of DeepSpeed's operators. ``cluster.hang_timeout_min``
limits the time without a step or a new phase, which rank 0 reports by its heartbeat. The timeout of collectives is
longer, see ``distributed.process_group``. The defaults are in ``distexp.config.cluster_section``.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from distexp.launch.exit_codes import HANG_CODE, TIMEOUT_CODE, encode_group_code
from distexp.launch.hang import inspect_workers
from distexp.runs.heartbeat import last_build_step, last_heartbeat
from distexp.runs.spec import RunSpec
from distexp.system.process_shutdown import WatchedProcess

POLL_S = 0.1
OWN_SIGTERM_S = 1.0
"""Time in which the agent's own SIGTERM arrives, if Slurm ended the job: Slurm signals every process of it."""


def watch(
    group: WatchedProcess,
    spec: RunSpec,
    run_dir: Path,
    node: int,
    started: float,
    *,
    peer_failed: Callable[[], bool] = lambda: False,
) -> int:
    """Wait until the workers end, exceed their time or hang, or until another node fails.

    Args:
        group: The parent process of the workers.
        spec: The run.
        run_dir: Directory of the run.
        node: The node.
        started: Start of the run, in Unix seconds.
        peer_failed: Returns whether another node has failed.

    Returns:
        The exit code of the workers' parent process, or a code of ``exit_codes``.
    """
    while (code := group.poll()) is None:
        exceeded = exceeded_limit(spec, run_dir, started)
        if exceeded == HANG_CODE:
            inspect_workers(group.pid, run_dir, node)
        if exceeded is not None:
            return exceeded
        if peer_failed():
            return 0  # The other node reports the cause.
        time.sleep(POLL_S)
    if code == -signal.SIGTERM:
        time.sleep(OWN_SIGTERM_S)
    return encode_group_code(code)


def exceeded_limit(spec: RunSpec, run_dir: Path, started: float) -> int | None:
    """Return the exit code for the time limit or the hang timeout if the run has exceeded it, else None.

    Args:
        spec: The run.
        run_dir: Directory of the run.
        started: Start of the run, in Unix seconds.
    """
    cluster, now = spec.config.cluster, time.time()
    limit_s = cluster.timeout_min * 60 if cluster.timeout_min else float("inf")
    if now - max(started, last_build_step(run_dir)) > limit_s:
        return TIMEOUT_CODE
    if now - max(started, last_heartbeat(run_dir)) > cluster.hang_timeout_min * 60:
        return HANG_CODE
    return None

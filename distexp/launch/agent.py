"""Agent of one node of a local run: ``python -m distexp.launch.agent RUN_DIR NODE [SOCKET]``.

On Slurm, ``slurm/node_task.py`` calls ``run_node``. An agent starts the workers of its node and samples their memory
from outside. It ends them if they hang, if they exceed their time, if another node failed, or if it gets SIGTERM. It
imports no torch, so that it costs little next to the workers.
``SOCKET`` is the file descriptor of a connection to the process from which the workers of a local run are forked.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from distexp.launch.failures import HANG_CODE, STOPPED_CODE, TIMEOUT_CODE, encode_group_code, inspect_workers
from distexp.launch.forked_workers import ForkedWorkers, NotStartedError
from distexp.launch.operator_build import is_simulated, lacks_gpus, lacks_operators, node_gpus, worker_environment
from distexp.measure.memory.sampler import Sampler
from distexp.runs import run_state
from distexp.runs.attempts import write_agent_process, write_error_file
from distexp.runs.record_sections import RunError
from distexp.runs.run_dir import AGENT_ERROR, GROUP_LOG, RENDEZVOUS, log_dir, memory_trace_path
from distexp.runs.run_state import last_build_step, last_heartbeat
from distexp.runs.spec import RunSpec
from distexp.runs.texts import ERROR_TYPE, free_bytes, full_disk_message, is_full_disk, release_reserve
from distexp.system.cgroups import cpu_count
from distexp.system.files import write_json
from distexp.system.processes import WatchedProcess, die_with_parent, end_tree, orphaned, start_module

GRACE_S = 4.0
"""Time between SIGTERM and SIGKILL for the workers."""

RENDEZVOUS_TIMEOUT_S = 120.0


class StoppedError(BaseException):
    """SIGTERM for the agent. It is not an Exception, so that nothing handles it as an error."""


def main() -> None:
    """Run the workers of a node. The exit code is that of the workers, or one of ``distexp.launch.failures``."""
    run_dir, node, started = Path(sys.argv[1]), int(sys.argv[2]), time.time()
    connection = int(sys.argv[3]) if len(sys.argv) > 3 else None
    signal.signal(signal.SIGTERM, raise_stopped)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The launcher handles Ctrl-C.
    for signal_number in run_state.SIGNALS:
        signal.signal(signal_number, lambda number, _: run_state.request_stop(run_dir, signal.Signals(number).name))
    die_with_parent(signal.SIGTERM)
    spec = RunSpec.read(run_dir)
    if node == 0:
        write_agent_process(run_dir)
    try:
        code = run_node(spec, run_dir, NodeContext(node, connection=connection), started)
    except StoppedError:
        code = STOPPED_CODE
    except OSError as error:
        code = 1
        write_start_error(run_dir, node, error)
    if code == STOPPED_CODE and node == 0 and orphaned():
        # The launcher is dead, so the head's agent writes the record. No other agent needs these imports.
        from distexp.launch.outcome import finalize_run

        finalize_run(spec, run_dir, {node: STOPPED_CODE}, started, "the launcher died, so the agent ended the workers")
    sys.exit(code)


def write_start_error(run_dir: Path, node: int, error: OSError) -> None:
    """Write why the agent could not start the workers, for example because the disk is full."""
    found = RunError(type(error).__name__, str(error), "setup")
    if is_full_disk(error):
        found = RunError(ERROR_TYPE, full_disk_message(error, run_dir, free_bytes(run_dir)), "setup")
    release_reserve(run_dir)
    write_error_file(AGENT_ERROR.path(run_dir, node), found)


def raise_stopped(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM: the agent ends its workers and then itself."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise StoppedError


@dataclass(frozen=True)
class NodeContext:
    """Position of an agent in its run."""

    node: int  # Number of the node, from 0. Node 0 is the head.
    address: str = "127.0.0.1"  # Name under which the other nodes reach this one.
    attempt: str = ""  # Identity of the attempt, so that files of an earlier one are ignored.
    peer_failed: Callable[[], bool] = lambda: False  # Returns whether another node has failed.
    # File descriptor of a connection to the process from which the workers are forked; None on Slurm.
    connection: int | None = None


def run_node(spec: RunSpec, run_dir: Path, context: NodeContext, started: float) -> int:
    """Start the workers of a node and watch them; end all of them before returning.

    ``started`` is the start of the run in Unix seconds. The result is the exit code of the node.
    """
    node = context.node
    with ExitStack() as stack, ExitStack() as sampling:
        if node == 0:
            rendezvous, holder = reserve_port(context.address, run_dir, context.attempt)
            stack.enter_context(holder)
        else:
            rendezvous = wait_for_head(run_dir, RENDEZVOUS_TIMEOUT_S, context.attempt)
        log_dir(run_dir, node).mkdir(parents=True, exist_ok=True)
        if lacks_gpus(spec, run_dir, node) or lacks_operators(spec, run_dir, node):
            return 1
        sampler = _sampler(spec, run_dir, node) if spec.config.measure.enabled else None
        if sampler is not None and context.connection is not None:  # The trace starts before the workers, as on Slurm.
            sampling.enter_context(sampler)
        try:
            group = start_group(spec, run_dir, context, rendezvous, stack, started=started)
        except NotStartedError as error:
            return error.code
        stack.callback(end_tree, group, GRACE_S)
        if sampler is not None and isinstance(group, ForkedWorkers):
            sampler.include(group.pid, group.server, group.others)
        elif sampler is not None:  # After the start of the process, because its thread could disturb the fork.
            sampling.enter_context(sampler)
        return watch(group, spec, run_dir, node, started, peer_failed=context.peer_failed)


def start_group(
    spec: RunSpec, run_dir: Path, context: NodeContext, rendezvous: Rendezvous, stack: ExitStack, *, started: float
) -> WatchedProcess:
    """Start the parent process of the workers. That of a local run is forked from one that has the libraries.

    Raises:
        NotStartedError: the process from which the workers are forked has died, or the run has exceeded a limit.
    """
    output = stack.enter_context(GROUP_LOG.path(run_dir, context.node).open("w"))
    arguments = (str(run_dir), str(context.node), rendezvous.address, str(rendezvous.port))
    if context.connection is not None:
        limit = partial(exceeded_limit, spec, run_dir, started)
        forked = ForkedWorkers.start(context.connection, arguments, output, limit)
        stack.callback(forked.close)
        return forked
    return start_module("distexp.worker.group", *arguments, env=worker_environment(spec, context.node), output=output)


def _sampler(spec: RunSpec, run_dir: Path, node: int) -> Sampler:
    """Return the sampler of the memory of a node's workers."""
    return Sampler(
        path=memory_trace_path(run_dir, node),
        gpu_indices=[gpu.index for gpu in node_gpus(spec, node)],
        interval_s=spec.config.measure.interval_s,
        cores=max(1, cpu_count() // (spec.nodes if is_simulated(spec) else 1)),
    )


# Rendezvous of a run's nodes: the head's address and port, in a file of the run directory.


@dataclass(frozen=True)
class Rendezvous:
    """Address and port of the head, with the attempt that they are valid for."""

    address: str
    port: int
    attempt: str = ""


def reserve_port(address: str, run_dir: Path, attempt: str = "") -> tuple[Rendezvous, socket.socket]:
    """Find a free port on the head, and write it for the other nodes.

    Returns:
        The rendezvous, and a bound socket that does not listen. While the socket is open, the kernel gives the port
        to no process that asks for a free one. torch sets SO_REUSEADDR, so it can still listen on the port.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    found = Rendezvous(address, holder.getsockname()[1], attempt)
    write_json(run_dir / RENDEZVOUS, asdict(found))
    return found, holder


def read_rendezvous(run_dir: Path) -> Rendezvous | None:
    """Return the rendezvous of the latest attempt, or None if the head has not written it."""
    try:
        return Rendezvous(**json.loads((run_dir / RENDEZVOUS).read_text()))
    except FileNotFoundError:
        return None


def wait_for_head(run_dir: Path, timeout_s: float, attempt: str = "") -> Rendezvous:
    """Wait for the rendezvous of an attempt and return it; raise TimeoutError if the head does not write it in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = read_rendezvous(run_dir)
        if found is not None and found.attempt == attempt:
            return found
        time.sleep(0.05)
    raise TimeoutError(f"node 0 wrote no {RENDEZVOUS} to {run_dir} within {timeout_s:g} s")


# Time limit and hang timeout of a run: the agent of each node watches its workers.
# ``cluster.timeout_min`` limits a run, from the end of the build of DeepSpeed's operators.
# ``cluster.hang_timeout_min`` limits the time without a step or a new phase, which rank 0 reports by its heartbeat.
# The timeout of collectives is longer, see ``distributed.process_group``. The defaults are in
# ``distexp.config.sections``.

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

    The result is the exit code of the workers' parent process, or one of the codes in ``distexp.launch.failures``.
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
    """Return the exit code for the time limit or the hang timeout if the run has exceeded it, else None."""
    cluster, now = spec.config.cluster, time.time()
    limit_s = cluster.timeout_min * 60 if cluster.timeout_min else float("inf")
    if now - max(started, last_build_step(run_dir)) > limit_s:
        return TIMEOUT_CODE
    if now - max(started, last_heartbeat(run_dir)) > cluster.hang_timeout_min * 60:
        return HANG_CODE
    return None


if __name__ == "__main__":
    main()

"""Agent of one node: ``python -m distexp.launch.agent RUN_DIR NODE [SOCKET]``, or a task of a Slurm job.

It starts the workers of its node and samples their memory from outside. It ends them if they hang, if
they exceed their time, or if it gets SIGTERM. It imports no torch, so that it costs little next to the workers.
``SOCKET`` is the file descriptor of a connection to the process from which the workers of a local run are forked.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from distexp.launch.exit_codes import STOPPED_CODE
from distexp.launch.forked_workers import ForkedWorkers, NotStartedError
from distexp.launch.node import is_simulated, node_gpus, worker_environment
from distexp.launch.node_requirements import lacks_gpus, lacks_operators
from distexp.launch.rendezvous import Rendezvous, reserve_port, wait_for_head
from distexp.launch.timeouts import exceeded_limit, watch
from distexp.measure.memory.sampler import Sampler
from distexp.runs import stop_request
from distexp.runs.error_files import write_error
from distexp.runs.full_disk import ERROR_TYPE, free_bytes, full_disk_message, is_full_disk, release_reserve
from distexp.runs.owner import write_agent
from distexp.runs.record_sections import RunError
from distexp.runs.run_dir import (
    agent_error_path,
    group_log_path,
    log_dir,
    memory_trace_path,
)
from distexp.runs.spec import RunSpec
from distexp.system.hardware import cpu_count
from distexp.system.process_shutdown import WatchedProcess, end_tree
from distexp.system.processes import die_with_parent, orphaned, start_module

GRACE_S = 4.0
"""Time between SIGTERM and SIGKILL for the workers."""

RENDEZVOUS_TIMEOUT_S = 120.0


class StoppedError(BaseException):
    """SIGTERM for the agent. It is not an Exception, so that nothing handles it as an error."""


def main() -> None:
    """Run the workers of a node. The exit code is that of the workers, or one of ``distexp.launch.exit_codes``."""
    run_dir, node, started = Path(sys.argv[1]), int(sys.argv[2]), time.time()
    connection = int(sys.argv[3]) if len(sys.argv) > 3 else None
    _handle_signals(run_dir)
    spec = RunSpec.read(run_dir)
    if node == 0:
        write_agent(run_dir)
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


def _handle_signals(run_dir: Path) -> None:
    """End the workers on SIGTERM and if the launcher dies; request a checkpoint on SIGUSR1 and SIGUSR2."""
    signal.signal(signal.SIGTERM, raise_stopped)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The launcher handles Ctrl-C.
    for signal_number in stop_request.SIGNALS:
        signal.signal(signal_number, lambda number, _: stop_request.request_stop(run_dir, signal.Signals(number).name))
    die_with_parent(signal.SIGTERM)


def write_start_error(run_dir: Path, node: int, error: OSError) -> None:
    """Write why the agent could not start the workers, for example because the disk is full."""
    found = RunError(type(error).__name__, str(error), "setup")
    if is_full_disk(error):
        found = RunError(ERROR_TYPE, full_disk_message(error, run_dir, free_bytes(run_dir)), "setup")
    release_reserve(run_dir)
    write_error(agent_error_path(run_dir, node), found)


def raise_stopped(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM: the agent ends its workers and then itself."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise StoppedError


@dataclass(frozen=True)
class NodeContext:
    """Position of an agent in its run.

    Attributes:
        node: Number of the node, from 0. Node 0 is the head.
        address: Name under which the other nodes reach this one.
        attempt: Identity of the attempt, so that files of an earlier one are ignored.
        peer_failed: Returns whether another node has failed.
        connection: File descriptor of a connection to the process from which the workers are forked; None on Slurm.
    """

    node: int
    address: str = "127.0.0.1"
    attempt: str = ""
    peer_failed: Callable[[], bool] = lambda: False
    connection: int | None = None


def run_node(spec: RunSpec, run_dir: Path, context: NodeContext, started: float) -> int:
    """Start the workers of a node and watch them; end all of them before returning.

    Args:
        spec: The run.
        run_dir: Directory of the run.
        context: Position of this node.
        started: Start of the run, in Unix seconds.

    Returns:
        The exit code of the node.
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

    Args:
        spec: The run.
        run_dir: Directory of the run.
        context: Position of this node.
        rendezvous: Where the workers meet.
        stack: Closes what the process needs while it runs.
        started: Start of the run, in Unix seconds.

    Raises:
        NotStartedError: the process from which the workers are forked has died, or the run has exceeded a limit.
    """
    output = stack.enter_context(group_log_path(run_dir, context.node).open("w"))
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


if __name__ == "__main__":
    main()

"""Agent of one node of a local run: ``python -m distexp.launch.agent RUN_DIR NODE [SOCKET]``.

On Slurm, ``slurm/node_task.py`` calls ``run_node``. An agent imports no torch, so that it costs little next to the
workers. ``SOCKET`` is the descriptor of a connection to the process from which the workers of a local run are forked.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any

from distexp.exceptions import name_limit
from distexp.launch.failures import HANG_CODE, STOPPED_CODE, TIMEOUT_CODE, encode_group_code, inspect_workers
from distexp.launch.node_setup import is_simulated, lacks_gpus, lacks_operators, node_gpus, worker_environment
from distexp.measure.memory.sampler import Sampler
from distexp.runs import attempts, run_state, texts
from distexp.runs.record import RunSpec
from distexp.runs.record_sections import RunError
from distexp.runs.run_dir import AGENT_ERROR, GROUP_LOG, RENDEZVOUS, log_dir, memory_trace_path
from distexp.system import cgroups, files
from distexp.system.processes import WatchedProcess, die_with_parent, end_tree, orphaned, receive, send, start_module

GRACE_S = 4.0
"""Time between SIGTERM and SIGKILL for the workers."""

RENDEZVOUS_TIMEOUT_S = 120.0
POLL_S = 0.1
SUSPENDED_S = 5.0
"""Time between two checks of the limits after which the run counts as suspended, as by SIGSTOP or a closed lid."""

OWN_SIGTERM_S = 1.0
"""Time in which the agent's own SIGTERM arrives, if Slurm ended the job: Slurm signals every process of it."""


class StoppedError(BaseException):
    """SIGTERM for the agent. It is not an Exception, so that nothing handles it as an error."""


class NoRendezvousError(OSError):
    """The head did not announce its address in time."""


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
        attempts.write_agent_process(run_dir)
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


def raise_stopped(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM: the agent ends its workers and then itself."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise StoppedError


def write_start_error(run_dir: Path, node: int, error: OSError) -> None:
    """Write why the agent could not start the workers, for example because the disk is full."""
    name = "NoRendezvous" if isinstance(error, NoRendezvousError) else type(error).__name__
    found = RunError(name, name_limit(str(error)), "setup")
    if texts.is_full_disk(error):
        found = texts.full_disk_error(error, run_dir, "setup")
    texts.release_reserve(run_dir)
    attempts.write_error_file(AGENT_ERROR.path(run_dir, node), found)


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
    """Start the workers of a node, watch them, and end them; return the exit code. ``started`` is in Unix seconds."""
    node = context.node
    # The sampler has its own stack, because its last sample must come before the end of the workers.
    with ExitStack() as stack, ExitStack() as sampling:
        rendezvous = _reserve_port(context, run_dir, stack) if node == 0 else _wait_for_head(run_dir, context.attempt)
        log_dir(run_dir, node).mkdir(parents=True, exist_ok=True)
        if lacks_gpus(spec, run_dir, node) or lacks_operators(spec, run_dir, node):
            return 1
        sampler = _make_sampler(spec, run_dir, node) if spec.config.measure.enabled else None
        output = stack.enter_context(GROUP_LOG.path(run_dir, node).open("w"))
        arguments = (str(run_dir), str(node), rendezvous.address, str(rendezvous.port))
        group: WatchedProcess
        if context.connection is None:
            environment = worker_environment(spec, node)
            group = start_module("distexp.worker.group", *arguments, env=environment, output=output)
            stack.callback(end_tree, group, GRACE_S)
            if sampler is not None:  # After the start of the process, because its thread could disturb the fork.
                sampling.enter_context(sampler)
        else:
            if sampler is not None:  # The trace starts before the workers, as on Slurm.
                sampling.enter_context(sampler)
            limit = partial(_exceeded_limit, spec, run_dir, started)
            try:
                group = forked = ForkedWorkers.start(context.connection, arguments, output, limit)
            except NotStartedError as error:
                return error.code
            stack.callback(forked.close)
            stack.callback(end_tree, forked, GRACE_S)
            if sampler is not None:
                sampler.include(forked.pid, forked.server, forked.others)
        return watch(group, spec, run_dir, node, started, peer_failed=context.peer_failed)


def _make_sampler(spec: RunSpec, run_dir: Path, node: int) -> Sampler:
    return Sampler(
        path=memory_trace_path(run_dir, node),
        gpu_indices=[gpu.index for gpu in node_gpus(spec, node)],
        interval_s=spec.config.measure.interval_s,
        cores=max(1, cgroups.cpu_count() // (spec.nodes if is_simulated(spec) else 1)),
    )


def watch(
    group: WatchedProcess,
    spec: RunSpec,
    run_dir: Path,
    node: int,
    started: float,
    *,
    peer_failed: Callable[[], bool] = lambda: False,
) -> int:
    """Wait until the workers end, exceed their time or hang, or another node fails; return the agent's exit code."""
    checked, resumed = time.time(), started
    while (code := group.poll()) is None:
        previous, checked = checked, time.time()
        resumed = checked if checked - previous > SUSPENDED_S else resumed
        exceeded = _exceeded_limit(spec, run_dir, started, resumed)
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


def _exceeded_limit(spec: RunSpec, run_dir: Path, started: float, resumed: float = 0.0) -> int | None:
    """Return the exit code for the time limit or the hang timeout if the run has exceeded it, else None.

    The time limit starts again at the end of the build of DeepSpeed's operators. The hang timeout is for the time
    without a step or a new phase, which rank 0 reports by its heartbeat. It starts again if the run was suspended until
    ``resumed``. The timeout of collectives is longer, see ``distributed.process_group``.
    """
    cluster, now = spec.config.cluster, time.time()
    limit_s = cluster.timeout_min * 60 if cluster.timeout_min else float("inf")
    if now - max(started, run_state.last_build_step(run_dir)) > limit_s:
        return TIMEOUT_CODE
    if now - max(started, resumed, run_state.last_heartbeat(run_dir)) > cluster.hang_timeout_min * 60:
        return HANG_CODE
    return None


@dataclass(frozen=True)
class Rendezvous:
    """Address and port of the head, and the attempt for which they are valid. The other nodes read them from a file."""

    address: str
    port: int
    attempt: str = ""


def read_rendezvous(run_dir: Path) -> Rendezvous | None:
    """Return the rendezvous of the latest attempt, or None if the head has not written it."""
    try:
        return Rendezvous(**json.loads((run_dir / RENDEZVOUS).read_text()))
    except FileNotFoundError:
        return None


def _reserve_port(context: NodeContext, run_dir: Path, stack: ExitStack) -> Rendezvous:
    """Find a free port on the head, and write it for the other nodes.

    The stack keeps a bound socket that does not listen. While it is open, the kernel gives the port to no process that
    asks for a free one. torch sets SO_REUSEADDR, so it can still listen on the port.
    """
    holder = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    found = Rendezvous(context.address, holder.getsockname()[1], context.attempt)
    files.write_json(run_dir / RENDEZVOUS, asdict(found))
    return found


def _wait_for_head(run_dir: Path, attempt: str) -> Rendezvous:
    """Wait for the rendezvous of an attempt; raise NoRendezvousError if the head does not write it in time."""
    deadline = time.monotonic() + RENDEZVOUS_TIMEOUT_S
    while time.monotonic() < deadline:
        found = read_rendezvous(run_dir)
        if found is not None and found.attempt == attempt:
            return found
        time.sleep(0.05)
    raise NoRendezvousError(f"node 0 wrote no {RENDEZVOUS} to {run_dir} within {RENDEZVOUS_TIMEOUT_S:g} s")


# A node's workers that are forked from a process with the libraries (``distexp.worker.shared_start``).


LOST_CODE = encode_group_code(-signal.SIGKILL)
"""Exit code of an agent whose workers have died with the process that they were forked from."""

REPLY_POLL_S = 0.1
"""Time between two checks of the limits, while the shared process imports. A slow file system may take minutes."""

REPORT_S = 30.0
"""Time that the shared process gets to send the exit code of a group that was killed."""


class NotStartedError(Exception):
    """The workers were not started, because a limit was exceeded or the shared process has ended."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code  # exit code of the agent


class ForkedWorkers:
    """The parent process of a node's workers. It has the methods of a ``Popen`` that the agent uses.

    Attributes:
        pid: Its process id. It stays reserved until ``close``, also if the process has ended.
        server: Id of the process that forked it, whose memory it shares.
        others: Ids of other shared processes on this node, which have the files of the libraries in memory too.
    """

    def __init__(self, channel: socket.socket, pid: int, server: int, others: Sequence[int] = ()) -> None:
        self.pid, self.server, self.others = pid, server, others
        self._channel = channel
        self._code: int | None = None

    @classmethod
    def start(
        cls, descriptor: int, arguments: Sequence[str], output: IO[str], limit: Callable[[], int | None] = lambda: None
    ) -> ForkedWorkers:
        """Request the workers from the shared process, and wait until its imports are done.

        Raise NotStartedError if the process has ended, or if ``limit`` returns an exit code, because a limit is
        exceeded.
        """
        channel = socket.socket(fileno=descriptor)
        channel.set_inheritable(False)
        channel.settimeout(REPLY_POLL_S)
        run_dir, node, address, port = arguments
        request = {"run_dir": str(Path(run_dir).absolute()), "node": int(node), "address": address, "port": int(port)}
        try:
            send(channel, request, [output.fileno()])
            started = _wait_for_start(channel, limit)
        except BaseException as error:
            channel.close()
            if isinstance(error, OSError):
                raise NotStartedError(LOST_CODE) from error
            raise
        return cls(channel, started["pid"], started["server"], started["others"])

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        self._channel.setblocking(False)
        with suppress(BlockingIOError):
            self._receive()
        return self._code

    def wait(self) -> int:
        """Wait for the end and return the exit code; that of SIGKILL if a stopped shared process sends none."""
        self._channel.settimeout(REPORT_S)
        with suppress(TimeoutError):
            return self._receive()
        return -signal.SIGKILL

    def _receive(self) -> int:
        if self._code is None:
            message = receive(self._channel).message
            # A dead server sends no exit code. The kernel kills its groups.
            self._code = -signal.SIGKILL if message is None else message["code"]
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal to the process if it still runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # The server may have died just now.
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Close the connection; the server then ends and forgets the process."""
        self._channel.close()


def _wait_for_start(channel: socket.socket, limit: Callable[[], int | None]) -> dict[str, Any]:
    """Wait until the shared process has forked the workers, and return its message."""
    while True:
        try:
            started = receive(channel).message
        except TimeoutError:
            code = limit()
            if code is not None:
                raise NotStartedError(code) from None
        else:
            if started is None or "pid" not in started:
                raise NotStartedError(LOST_CODE)
            return started


if __name__ == "__main__":
    main()

"""One run on this machine: start and watch an agent per node, then write the record."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from distexp.console.screen import Screen
from distexp.exceptions import InterruptedRunError
from distexp.launch import oom
from distexp.launch.exit_codes import HANG_CODE
from distexp.launch.local.warm_start import WarmStart
from distexp.launch.outcome import finalize_run, start_attempt
from distexp.runs import stop_request
from distexp.runs.owner import write_launcher
from distexp.runs.record import RunRecord
from distexp.runs.spec import RunSpec
from distexp.system.processes import end_tree, start_module
from distexp.system.signals import handle_signals
from distexp.tracking.process import tracked

POLL_S = 0.1
AGENT_GRACE_S = 7.0
HANG_GRACE_S = 4.0


def run_locally(spec: RunSpec, directory: Path, screen: Screen, warm: WarmStart | None = None) -> RunRecord:
    """Run a spec on this machine with one agent per node, and return its record.

    Args:
        spec: The run.
        directory: Directory of the run.
        screen: What shows the run.
        warm: Start-up that this run shares with others; None if it imports the libraries itself.

    Raises:
        InterruptedRunError: if this process got a signal. SIGINT and SIGTERM end the run at once. SIGUSR1 and SIGUSR2
            end it after a checkpoint. The record is written first.
    """
    started = time.time()
    start_attempt(spec, directory)
    write_launcher(directory)
    oom.save_counters(directory)
    stopped: InterruptedRunError | None = None
    agents: list[subprocess.Popen[bytes]] = []
    with tracked(spec, directory) as tracking, interrupts_raised(), stop_signals_forwarded(directory) as received:
        try:
            for node in range(spec.nodes):
                agents.append(_start_agent(spec, directory, node, warm))
            with screen.follow(spec, directory) as live:
                _watch(agents, live.refresh)
        except InterruptedRunError as interruption:
            stopped = interruption
        finally:
            with interrupts_collected() as late:
                codes = {node: _end(agent) for node, agent in enumerate(agents)}
                record = finalize_run(spec, directory, codes, started, str(stopped) if stopped else None)
    screen.show_result(record, directory, tracking.messages)
    if stopped is None and (received or late):
        stopped = InterruptedRunError([*received, *late][0])
    if stopped is not None:
        raise stopped
    return record


def _start_agent(spec: RunSpec, directory: Path, node: int, warm: WarmStart | None) -> subprocess.Popen[bytes]:
    shared = None if warm is None else warm.connect(spec, directory, node)
    sockets = [] if shared is None else [shared]
    with ExitStack() as stack:
        for each in sockets:  # Only the agent keeps it, so that its end is noticed.
            stack.enter_context(each)
        # SIGTERM and not SIGKILL, so that the agent of a dead launcher ends its workers and writes the record.
        return start_module(
            "distexp.launch.agent",
            *(str(directory), str(node), *(str(each.fileno()) for each in sockets)),
            env=os.environ,
            death_signal=signal.SIGTERM,
            sockets=sockets,
        )


def _watch(agents: Sequence[subprocess.Popen[bytes]], refresh: Callable[[], None]) -> None:
    """Wait until all agents have succeeded, or one has failed."""
    while True:
        codes = [agent.poll() for agent in agents]
        refresh()
        if HANG_CODE in codes:
            # The other agents detect the hang too. Give them time to write the stacks of their workers.
            _wait_all(agents, HANG_GRACE_S)
            return
        if any(code not in (None, 0) for code in codes) or all(code == 0 for code in codes):
            return
        time.sleep(POLL_S)


def _wait_all(agents: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(agent.poll() is None for agent in agents):
        time.sleep(POLL_S)


def _end(agent: subprocess.Popen[bytes]) -> int:
    """End an agent and its workers; return its exit code, or 0 if it was still running."""
    ended_by_itself = agent.poll() is not None
    end_tree(agent, AGENT_GRACE_S)
    return agent.returncode if ended_by_itself else 0


@contextmanager
def interrupts_raised() -> Iterator[None]:
    """Raise InterruptedRunError on Ctrl-C and SIGTERM inside the block."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise InterruptedRunError(number)

    with handle_signals(stop, signal.SIGINT, signal.SIGTERM):
        yield


@contextmanager
def stop_signals_forwarded(directory: Path) -> Iterator[list[int]]:
    """Request a stop after a checkpoint on SIGUSR1 and SIGUSR2; yield the list of signals received."""
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        stop_request.request_stop(directory, signal.Signals(number).name)

    with handle_signals(forward, *stop_request.SIGNALS):
        yield received


@contextmanager
def interrupts_collected() -> Iterator[list[int]]:
    """Yield the list of Ctrl-C and SIGTERM inside the block, which do not stop it: the record is written completely."""
    received: list[int] = []
    with handle_signals(lambda number, _: received.append(number), signal.SIGINT, signal.SIGTERM):
        yield received

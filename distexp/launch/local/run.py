"""One run from spec to record on this machine: agents start, are watched, and leave one record behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from distexp.console.screen import Screen
from distexp.exceptions import InterruptedRunError
from distexp.launch import oom
from distexp.launch.outcome import HANG_CODE, finalize_run, start_attempt
from distexp.runs import stop_request
from distexp.runs.record import RunRecord
from distexp.runs.spec import RunSpec
from distexp.system.processes import end_tree, start_module
from distexp.tracking.process import tracked

POLL_S = 0.1
AGENT_GRACE_S = 7.0
HANG_GRACE_S = 4.0


def run_locally(spec: RunSpec, directory: Path, screen: Screen) -> RunRecord:
    """Runs a spec on this machine, each node by an agent of its own, and returns its record.

    Raises:
        InterruptedRunError: after the record is written, where this process was told to stop: at once, or by
            SIGUSR1 or SIGUSR2, after a checkpoint.
    """
    started = time.time()
    start_attempt(spec, directory)
    oom.save_counters(directory)
    stopped: InterruptedRunError | None = None
    agents: list[subprocess.Popen[bytes]] = []
    with tracked(spec, directory) as tracking, signals_raised(), notice_given(directory) as noticed:
        try:
            for node in range(spec.nodes):
                agents.append(_start_agent(directory, node))
            with screen.follow(spec, directory) as live:
                _watch(agents, live.refresh)
        except InterruptedRunError as interruption:
            stopped = interruption
        finally:
            with signals_ignored():
                codes = {node: _end(agent) for node, agent in enumerate(agents)}
                record = finalize_run(spec, directory, codes, started, str(stopped) if stopped else None)
    screen.show_result(record, tracking.messages)
    if stopped is None and noticed:
        stopped = InterruptedRunError(noticed[0])
    if stopped is not None:
        raise stopped
    return record


def _start_agent(directory: Path, node: int) -> subprocess.Popen[bytes]:
    # SIGTERM, not SIGKILL: an agent whose launcher dies ends its workers and writes the record.
    return start_module("distexp.launch.agent", str(directory), str(node), env=os.environ, death_signal=signal.SIGTERM)


def _watch(agents: Sequence[subprocess.Popen[bytes]], refresh: Callable[[], None]) -> None:
    """Waits until all agents have ended well, or one has not."""
    while True:
        codes = [agent.poll() for agent in agents]
        refresh()
        if HANG_CODE in codes:
            # The other nodes see the hang as well, and write down their stacks.
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
    """Ends an agent with all that is below it; its exit code, 0 where only the others' failure ended it."""
    ended_by_itself = agent.poll() is not None
    end_tree(agent, AGENT_GRACE_S)
    return agent.returncode if ended_by_itself else 0


@contextmanager
def signals_raised() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise InterruptedRunError inside."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise InterruptedRunError(number)

    with _handled(stop, signal.SIGINT, signal.SIGTERM):
        yield


@contextmanager
def notice_given(directory: Path) -> Iterator[list[int]]:
    """SIGUSR1 and SIGUSR2 ask the run to end after a checkpoint; those that came are in the list."""
    came: list[int] = []

    def give(number: int, frame: FrameType | None) -> None:
        came.append(number)
        stop_request.request_stop(directory, signal.Signals(number).name)

    with _handled(give, *stop_request.SIGNALS):
        yield came


@contextmanager
def signals_ignored() -> Iterator[None]:
    """A second Ctrl-C does not tear what is being written."""
    with _handled(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM):
        yield


@contextmanager
def _handled(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers, *numbers: signal.Signals
) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)

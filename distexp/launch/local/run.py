"""One run on this machine: start and watch an agent per node, then write the record."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from distexp.config import Config
from distexp.console.screen import Screen
from distexp.exceptions import InterruptedRunError, is_closed_output
from distexp.launch import oom
from distexp.launch.exit_codes import HANG_CODE
from distexp.launch.local.interrupts import interrupts_collected, interrupts_raised, stop_signals_forwarded
from distexp.launch.local.shared_start import SharedStart
from distexp.launch.outcome import finalize_run, start_attempt
from distexp.runs.owner import write_launcher
from distexp.runs.record import RunRecord
from distexp.runs.spec import RunSpec
from distexp.system.process_shutdown import end_tree
from distexp.system.processes import start_module
from distexp.tracking.process import tracked

POLL_S = 0.1
AGENT_GRACE_S = 7.0
"""Time between SIGTERM and SIGKILL for an agent, which ends its workers first."""

OUTPUT_CLOSED = "the program that read the output has ended, for example `head`"

HANG_GRACE_S = 4.0
"""Time that the other agents get to detect a hang too, and to write the stacks of their workers."""


AgentCommand = Callable[[Config, Sequence[str]], Sequence[str]]
"""Function that returns the command for the agents of a run, from its configuration and the arguments of Python."""


def run_locally(
    spec: RunSpec, directory: Path, screen: Screen, shared_start: SharedStart, agent_command: AgentCommand
) -> RunRecord:
    """Run a spec on this machine with one agent per node, and return its record.

    Args:
        spec: The run.
        directory: Directory of the run.
        screen: What shows the run.
        shared_start: Processes from which the workers are forked.
        agent_command: Returns the command of an agent.

    Raises:
        InterruptedRunError: if this process got a signal. SIGINT and SIGTERM end the run at once. SIGUSR1 and SIGUSR2
            end it after a checkpoint. The record is written first.
        BrokenPipeError, SystemExit: if the output was closed. The run is ended and recorded first.
    """
    started = time.time()
    start_attempt(spec, directory)
    write_launcher(directory)
    oom.save_counters(directory)
    interruption: InterruptedRunError | None = None
    stopped: str | None = None
    agents: list[subprocess.Popen[bytes]] = []
    with tracked(spec, directory) as tracking, interrupts_raised(), stop_signals_forwarded(directory) as received:
        try:
            for node in range(spec.nodes):
                agents.append(_start_agent(spec, directory, node, shared_start, agent_command))
            with screen.follow(spec, directory) as live:
                _watch(agents, live.refresh)
        except InterruptedRunError as error:
            interruption, stopped = error, error.reason
        except (BrokenPipeError, SystemExit) as error:
            stopped = OUTPUT_CLOSED if is_closed_output(error) else None
            raise
        finally:
            with interrupts_collected() as late:
                codes = {node: _end(agent) for node, agent in enumerate(agents)}
                codes = shared_start.true_codes(directory, codes)
                record = finalize_run(spec, directory, codes, started, stopped)
    screen.show_result(record, directory, tracking.messages)
    _raise_interruption(interruption, [*received, *late])
    return record


def _raise_interruption(interruption: InterruptedRunError | None, signals: Sequence[int]) -> None:
    """Raise the error that interrupted a run, or that of the first signal that did not stop it at once."""
    if interruption is not None:
        raise interruption
    if signals:
        raise InterruptedRunError(signals[0])


def _start_agent(
    spec: RunSpec, directory: Path, node: int, shared_start: SharedStart, agent_command: AgentCommand
) -> subprocess.Popen[bytes]:
    """Start the agent of a node, with a connection to the process from which its workers are forked."""
    # Only the agent keeps the connection, so that the other process notices its end.
    with shared_start.connect(spec, node) as connection:
        # SIGTERM and not SIGKILL, so that the agent of a dead launcher ends its workers and writes the record.
        return start_module(
            "distexp.launch.agent",
            *(str(directory), str(node), str(connection.fileno())),
            env=os.environ,
            death_signal=signal.SIGTERM,
            inherited=[connection.fileno()],
            command=partial(agent_command, spec.config),
        )


def _watch(agents: Sequence[subprocess.Popen[bytes]], refresh: Callable[[], None]) -> None:
    """Wait until all agents have succeeded, or one has failed."""
    while True:
        codes = [agent.poll() for agent in agents]
        refresh()
        if HANG_CODE in codes:
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

"""Shared start-up of local runs: one process per node imports the libraries, and each run is forked from it.

A run shares the process only if its own imports would give the same result (``import_conditions``). Otherwise the
process is replaced. Custom code is never shared, because only workers import it.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from distexp.launch.local.import_conditions import ImportConditions
from distexp.runs.run_dir import shared_start_log_path
from distexp.runs.spec import RunSpec
from distexp.system.messages import message_pair, send
from distexp.system.process_shutdown import end_tree
from distexp.system.processes import start_module

GRACE_S = 1.0
DIED = (
    "note: the shared start-up process has ended ({code}), so the runs import the libraries themselves again. "
    "Its output is in {log}"
)


@dataclass(frozen=True)
class SharedProcess:
    """A process that has imported the libraries, and the socket that brings it the connections of the agents."""

    conditions: ImportConditions
    process: subprocess.Popen[bytes]
    control: socket.socket
    log: Path

    def end(self) -> None:
        """End the process."""
        self.control.close()
        end_tree(self.process, GRACE_S)


class SharedStart:
    """Context manager for runs that share a start-up: ``run_locally(..., shared_start=...)``.

    Each simulated node has a process, so that its memory is that of a node. If a process dies, the runs start without
    it.

    Args:
        note: Prints a message for the user.
    """

    def __init__(self, note: Callable[[str], None] = print) -> None:
        self._note = note
        self._processes: dict[int, SharedProcess] = {}  # by node
        self._usable = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end_all()

    def connect(self, spec: RunSpec, run_dir: Path, node: int) -> socket.socket | None:
        """Return a connection to the process from which the workers of a node can be forked.

        Args:
            spec: The run.
            run_dir: Directory of the run.
            node: The node.

        Returns:
            A socket for the agent of the node; None if the run must import the libraries itself.
        """
        if not self._usable:
            return None
        shared = self._matching(spec, run_dir, node)
        ours, theirs = message_pair()
        try:
            send(shared.control, {}, [theirs.fileno()])
        except OSError:
            ours.close()
            self._give_up(shared)
            return None
        finally:
            theirs.close()
        return ours

    def _matching(self, spec: RunSpec, run_dir: Path, node: int) -> SharedProcess:
        """Return the process of a node; replace it if its imports would be others."""
        conditions, shared = ImportConditions.of(spec, node), self._processes.get(node)
        if shared is not None and shared.conditions != conditions:
            change = conditions.describe_change(shared.conditions)
            self._note(f"note: node {node} starts a new shared process, because of {change}")
            shared.end()
            shared = None
        if shared is None:
            shared = self._processes[node] = _start(conditions, run_dir, node)
        return shared

    def _give_up(self, shared: SharedProcess) -> None:
        code = shared.process.wait()
        self._usable = False
        self._end_all()
        self._note(DIED.format(code=f"signal {-code}" if code < 0 else f"exit code {code}", log=shared.log))

    def _end_all(self) -> None:
        while self._processes:
            self._processes.popitem()[1].end()


def _start(conditions: ImportConditions, run_dir: Path, node: int) -> SharedProcess:
    ours, theirs = message_pair()
    log = shared_start_log_path(run_dir, node)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output, theirs:
        process = start_module(
            "distexp.worker.shared_start",
            *(str(theirs.fileno()), str(run_dir)),
            env=conditions.environment,
            output=output,
            sockets=[theirs],
        )
    return SharedProcess(conditions, process, ours, log)

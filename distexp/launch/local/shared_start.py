"""Shared start-up of local runs: a process of the node imports the libraries, and each run is forked from it.

A run shares the process only if its own imports would give the same result (``import_conditions``). Otherwise it gets
another process, and the first one is kept for later runs. So a search that alternates between strategies imports the
libraries of each once. Custom code is never shared, because only workers import it.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from distexp.launch.local.import_conditions import ImportConditions
from distexp.models import shared_weights
from distexp.runs.run_dir import shared_start_log_path
from distexp.runs.spec import RunSpec
from distexp.system.cgroups import available_memory
from distexp.system.messages import message_pair, send
from distexp.system.process_shutdown import end_tree
from distexp.system.processes import start_module
from distexp.system.units import MIB

GRACE_S = 1.0
KEPT = 4
"""Most processes of a node. A search on one and on two GPUs, with DeepSpeed and without, needs as many."""

MIN_FREE_MIB = 8192.0
"""If the machine has less free memory, a node keeps one process only. Each takes about 512 MiB."""

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


@dataclass
class SharedNode:
    """What the runs on a node share.

    Attributes:
        processes: Processes with different imports. The one that was used last is at the end.
        weights: File in memory for random weights (``distexp.models.shared_weights``). All processes offer it.
    """

    processes: list[SharedProcess] = field(default_factory=list)
    weights: int = field(default_factory=shared_weights.make_file)

    def end(self) -> None:
        """End the processes, and free the weights."""
        while self.processes:
            self.processes.pop().end()
        os.close(self.weights)


class SharedStart:
    """Context manager for runs that share a start-up: ``run_locally(..., shared_start=...)``.

    Each simulated node has its own processes, so that its memory is that of a node. If a process dies, the runs start
    without them.

    Args:
        note: Prints a message for the user.
    """

    def __init__(self, note: Callable[[str], None] = print) -> None:
        self._note = note
        self._nodes: dict[int, SharedNode] = {}
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
        others = [known.process.pid for known in self._nodes[node].processes if known is not shared]
        ours, theirs = message_pair()
        try:
            send(shared.control, {"others": others}, [theirs.fileno()])
        except OSError:
            ours.close()
            self._give_up(shared)
            return None
        finally:
            theirs.close()
        return ours

    def _matching(self, spec: RunSpec, run_dir: Path, node: int) -> SharedProcess:
        """Return the process of a node with the imports of a run; start it if there is none."""
        conditions = ImportConditions.of(spec, node)
        if node not in self._nodes:
            self._nodes[node] = SharedNode()
        known = self._nodes[node].processes
        shared = next((process for process in known if process.conditions == conditions), None)
        if shared is not None:
            known.remove(shared)
        else:
            if known:
                change = conditions.describe_change(known[-1].conditions)
                self._note(f"note: node {node} starts a new shared process, because of {change}")
            _end_superfluous(known, conditions)
            shared = _start(conditions, run_dir, node, self._nodes[node].weights)
        known.append(shared)
        return shared

    def _give_up(self, shared: SharedProcess) -> None:
        code = shared.process.wait()
        self._usable = False
        self._end_all()
        self._note(DIED.format(code=f"signal {-code}" if code < 0 else f"exit code {code}", log=shared.log))

    def _end_all(self) -> None:
        while self._nodes:
            self._nodes.popitem()[1].end()


def _end_superfluous(known: list[SharedProcess], new: ImportConditions) -> None:
    """End processes before a new one starts: those that no run can use any more, and then the oldest ones."""
    kept = [process for process in known if not process.conditions.is_outdated(new)]
    most = KEPT - 1 if available_memory() >= MIN_FREE_MIB * MIB else 0
    kept = kept[max(0, len(kept) - most) :]
    for process in known:
        if process not in kept:
            process.end()
    known[:] = kept


def _start(conditions: ImportConditions, run_dir: Path, node: int, weights: int) -> SharedProcess:
    ours, theirs = message_pair()
    log = shared_start_log_path(run_dir, node)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output, theirs:
        process = start_module(
            "distexp.worker.shared_start",
            *(str(theirs.fileno()), str(weights), str(run_dir)),
            env=conditions.environment,
            output=output,
            inherited=[theirs.fileno(), weights],
        )
    return SharedProcess(conditions, process, ours, log)

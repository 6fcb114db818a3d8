"""Start of the workers of local runs: a process of each node imports the libraries, and each run is forked from it.

A run is forked from a process whose imports would give the same result (``ImportConditions``). A node keeps several
of them, so that a search that alternates between strategies imports the libraries of each once. Custom code is never
shared, because only workers import it.
"""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

from distexp.launch import failures, node_setup
from distexp.launch.agent import LOST_CODE
from distexp.models import shared_weights
from distexp.runs.record import RunSpec
from distexp.runs.run_dir import GROUP_LOG
from distexp.system import cgroups, files
from distexp.system.processes import end_tree, message_pair, send, start_module, wait_until
from distexp.system.units import MIB
from distexp.worker.preload import COMPILER, declared_preloads, own_modules, own_modules_of

GRACE_S = 1.0
KEPT = 4
"""Most processes of a node. A search on one and on two GPUs, with DeepSpeed and without, needs as many."""

MIN_FREE_MIB = 8192.0
"""If the machine has less free memory, a node keeps one process only. Each takes about 512 MiB."""


@dataclass(frozen=True)
class SharedProcess:
    """A process that has imported the libraries."""

    conditions: ImportConditions
    process: subprocess.Popen[bytes]
    control: socket.socket  # Socket that brings it the connections of the agents.
    output: IO[str]  # What it has printed, in memory. It starts before there is a run directory.

    @property
    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        return self.process.poll() is not None

    def end(self) -> None:
        """End the process."""
        self.control.close()
        end_tree(self.process, GRACE_S)
        self.output.close()


@dataclass
class SharedNode:
    """What the runs on a node share."""

    # File in memory for random weights (``distexp.models.shared_weights``), which all processes offer; None if the runs
    # share none.
    weights: int | None
    # Processes with different imports. The one that was used last is at the end.
    processes: list[SharedProcess] = field(default_factory=list)

    def end(self) -> None:
        """End the processes, and free the weights."""
        while self.processes:
            self.processes.pop().end()
        if self.weights is not None:
            os.close(self.weights)


END_S = 2.0
"""Time for the end of a process that has closed its connections."""


class SharedStart:
    """Context manager for local runs, whose workers are forked from processes that have imported the libraries.

    Each simulated node has its own processes, so that its memory is that of a node.
    """

    def __init__(self, *, shares_weights: bool = True) -> None:
        self.note: Callable[[str], None] = print  # Prints a message for the user. Each reason is printed once.
        self._shares_weights = shares_weights
        self._nodes: dict[int, SharedNode] = {}
        self._noted: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        while self._nodes:
            self._nodes.popitem()[1].end()

    def prepare(self, spec: RunSpec) -> None:
        """Start the processes of a run, so that they import the libraries while the launcher prepares the run."""
        for node in range(spec.nodes):
            self._matching(spec, node)

    def connect(self, spec: RunSpec, node: int) -> socket.socket:
        """Return a connection for the agent of a node, to the process from which its workers are forked."""
        shared = self._matching(spec, node)
        others = [known.process.pid for known in self._nodes[node].processes if known is not shared]
        ours, theirs = message_pair()
        with theirs, suppress(OSError):  # The process may have died just now. The agent then finds it dead too.
            send(shared.control, {"others": others}, [theirs.fileno()])
        return ours

    def true_codes(self, run_dir: Path, codes: Mapping[int, int]) -> dict[int, int]:
        """Return the exit codes of agents, as if each had been the parent of the process that its workers came from.

        An agent only notices that this process has died. How it died, and what it printed, is known here.
        """
        return {node: self._death_of(run_dir, node) if code == LOST_CODE else code for node, code in codes.items()}

    def _death_of(self, run_dir: Path, node: int) -> int:
        """Return the exit code of an agent that has lost its workers, and add the output of their origin to the log."""
        shared = self._nodes[node].processes[-1]
        # It closes its connections some time before its end. If it does not end, only the workers were killed.
        if not wait_until(lambda: shared.has_ended, END_S):
            return LOST_CODE
        shared.output.seek(0)
        with GROUP_LOG.path(run_dir, node).open("a") as log:
            shutil.copyfileobj(shared.output, log)
        return failures.encode_group_code(shared.process.returncode)

    def _matching(self, spec: RunSpec, node: int) -> SharedProcess:
        """Return the process of a node with the imports of a run; start it if there is none."""
        conditions = ImportConditions.of(spec, node)
        if node not in self._nodes:
            self._nodes[node] = SharedNode(shared_weights.make_file() if self._shares_weights else None)
        known = self._nodes[node].processes
        for ended in [process for process in known if process.has_ended]:
            known.remove(ended)
            ended.end()
            code = ended.process.returncode
            self._note_once(f"Their process has ended: {f'signal {-code}' if code < 0 else f'exit code {code}'}")
        shared = next((process for process in known if process.conditions == conditions), None)
        if shared is not None:
            known.remove(shared)
        else:
            if known:
                self._note_once(f"Different: {conditions.describe_change(known[-1].conditions)}")
            _end_superfluous(known, conditions)
            shared = _start(conditions, spec, self._nodes[node].weights)
        known.append(shared)
        return shared

    def _note_once(self, reason: str) -> None:
        if reason not in self._noted:
            self._noted.add(reason)
            self.note(f"note: a run cannot share the imports of an earlier one. {reason}")


def _end_superfluous(known: list[SharedProcess], new: ImportConditions) -> None:
    """End processes before a new one starts: those that no run can use any more, and then the oldest ones."""
    state = (new.folder, new.newest_source_ns)
    kept = [old for old in known if (old.conditions.folder, old.conditions.newest_source_ns) == state]
    most = KEPT - 1 if cgroups.available_memory() >= MIN_FREE_MIB * MIB else 0
    kept = kept[max(0, len(kept) - most) :]
    for process in known:
        if process not in kept:
            process.end()
    known[:] = kept


def _start(conditions: ImportConditions, spec: RunSpec, weights: int | None) -> SharedProcess:
    ours, theirs = message_pair()
    output = os.fdopen(os.memfd_create("distexp-shared-start"), "w+")
    with theirs:
        process = start_module(
            "distexp.worker.shared_start",
            str(theirs.fileno()),
            env=conditions.environment,
            output=output,
            inherited=[theirs.fileno()],
        )
    message = {"modules": own_modules(spec.config), "device": spec.config.cluster.device}
    send(ours, message, [] if weights is None else [weights])
    return SharedProcess(conditions, process, ours, output)


@dataclass(frozen=True)
class ImportConditions:
    """Conditions under which a node's workers import their libraries. Equal ones give equal processes."""

    environment: dict[str, str]
    folder: str  # Working directory, from which Python imports packages.
    libraries: tuple[str, ...]  # Modules that decide which libraries are imported.
    newest_source_ns: int  # Time of the latest change to a source file of distexp.

    @classmethod
    def of(cls, spec: RunSpec, node: int) -> ImportConditions:
        """Return the conditions of a node's workers."""
        # lstat, because editors mark open files by links that lead nowhere.
        newest_source_ns = max(path.lstat().st_mtime_ns for path in files.PACKAGE.rglob("*.py"))
        return cls(node_setup.worker_environment(spec, node), os.getcwd(), _libraries(spec), newest_source_ns)

    def describe_change(self, before: ImportConditions) -> str:
        """Return what differs from earlier conditions. Values are not named, because they may be secret."""
        names = self.environment.keys() | before.environment.keys()
        changes = sorted(name for name in names if self.environment.get(name) != before.environment.get(name))
        titles = {
            "libraries": "the libraries",
            "folder": "the working directory",
            "newest_source_ns": "the source files of distexp",
        }
        changes += [title for name, title in titles.items() if getattr(self, name) != getattr(before, name)]
        return ", ".join(changes)


def _libraries(spec: RunSpec) -> tuple[str, ...]:
    """Return the modules that decide which libraries are imported.

    Strategies that need only torch share a start-up. A group imports the rest of what its strategy needs.
    """
    config = spec.config
    strategies = own_modules_of([config.strategy._target_])
    modules = [module for module in own_modules(config) if module not in (*strategies, COMPILER)]
    for strategy in strategies:
        found = importlib.import_module(strategy)  # The launcher may import it, because it imports no torch.
        preloaded = declared_preloads(found, config.cluster.device)
        modules += [module for module in preloaded if not module.startswith("torch.")]
    return tuple(modules)

"""Shared start-up of local runs: one process per node imports the libraries, and each run is forked from it.

A run shares the process only if its own imports would give the same result: the same environment, working directory,
libraries and source files of distexp. Otherwise the process is replaced. Custom code is never shared, because only
workers import it.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from distexp.config.paths import PACKAGE
from distexp.launch.node import worker_environment
from distexp.runs.run_dir import shared_start_log_path
from distexp.runs.spec import RunSpec
from distexp.system.messages import message_pair, send
from distexp.system.processes import end_tree, start_module

GRACE_S = 1.0
DIED = (
    "note: the shared start-up process has ended ({code}), so the runs import the libraries themselves again. "
    "Its output is in {log}"
)


@dataclass(frozen=True)
class StartUp:
    """What the imports of a run depend on. Equal ones give equal processes."""

    environment: dict[str, str]
    folder: str
    libraries: tuple[str, ...]
    source: int

    @classmethod
    def of(cls, spec: RunSpec, node: int) -> StartUp:
        """Return the start-up of a node's workers."""
        return cls(worker_environment(spec, node), os.getcwd(), _libraries(spec), _newest_source())

    def describe_change(self, before: StartUp) -> str:
        """Return what differs from an earlier start-up. Values are not named, because they may be secret."""
        names = self.environment.keys() | before.environment.keys()
        changed = sorted(name for name in names if self.environment.get(name) != before.environment.get(name))
        libraries = () if self.libraries == before.libraries else ("the libraries",)
        folder = () if self.folder == before.folder else ("the working directory",)
        source = () if self.source == before.source else ("the source files of distexp",)
        return ", ".join((*changed, *libraries, *folder, *source))


@dataclass(frozen=True)
class SharedProcess:
    """A process that has imported the libraries, and the socket that brings it the connections of the agents."""

    start_up: StartUp
    process: subprocess.Popen[bytes]
    control: socket.socket
    log: Path

    def end(self) -> None:
        """End the process."""
        self.control.close()
        end_tree(self.process, GRACE_S)


class WarmStart:
    """Context manager for runs that share a start-up: ``run_locally(..., warm=warm)``.

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
        """Return the process of a node; replace it if the run needs another start-up."""
        start_up, shared = StartUp.of(spec, node), self._processes.get(node)
        if shared is not None and shared.start_up != start_up:
            change = start_up.describe_change(shared.start_up)
            self._note(f"note: node {node} starts a new shared process, because of {change}")
            shared.end()
            shared = None
        if shared is None:
            shared = self._processes[node] = _start(start_up, run_dir, node)
        return shared

    def _give_up(self, shared: SharedProcess) -> None:
        code = shared.process.wait()
        self._usable = False
        self._end_all()
        self._note(DIED.format(code=f"signal {-code}" if code < 0 else f"exit code {code}", log=shared.log))

    def _end_all(self) -> None:
        while self._processes:
            self._processes.popitem()[1].end()


def _start(start_up: StartUp, run_dir: Path, node: int) -> SharedProcess:
    ours, theirs = message_pair()
    log = shared_start_log_path(run_dir, node)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output, theirs:
        process = start_module(
            "distexp.worker.shared_start",
            *(str(theirs.fileno()), str(run_dir)),
            env=start_up.environment,
            output=output,
            sockets=[theirs],
        )
    return SharedProcess(start_up, process, ours, log)


def _libraries(spec: RunSpec) -> tuple[str, ...]:
    """Return the modules that decide which libraries are imported.

    Strategies that need only torch share a start-up. A group imports the rest of what its strategy needs.
    """
    config = spec.config
    names = [config.model._target_, config.dataset._target_, config.engine._target_]
    modules = [name for name in (target.rpartition(".")[0] for target in names) if _is_own(name)]
    strategy = config.strategy._target_.rpartition(".")[0]
    if _is_own(strategy):
        found = importlib.import_module(strategy)  # The launcher may import it, because it imports no torch.
        names = [*getattr(found, "PRELOAD", ())]
        names += getattr(found, "PRELOAD_ON_CPU", ()) if config.cluster.device == "cpu" else ()
        modules += [name for name in names if not name.startswith("torch.")]
    return tuple(modules)


def _is_own(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] == PACKAGE.name


def _newest_source() -> int:
    # lstat, because editors mark open files by links that lead nowhere.
    return max(path.lstat().st_mtime_ns for path in PACKAGE.rglob("*.py"))

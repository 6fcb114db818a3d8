"""Processes behind a local run: ``owner.json`` names its launcher and the agent of its first node.

On the same machine, they decide at once whether the run is still running. Elsewhere only the age of the run's files
can decide.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from distexp.runs.json_files import write_json
from distexp.runs.run_dir import OWNER, agent_owner_path
from distexp.runs.typed_values import read_dataclass
from distexp.system.process_identity import machine_id, start_ticks

AGENT_TIMEOUT_S = 30.0
"""Longest wait for an agent. It needs a few seconds to end its workers and to write the record."""

POLL_S = 0.1
"""Time between two checks whether an agent has ended."""


@dataclass(frozen=True)
class Owner:
    """A process. ``started`` is different for a later process with the same id."""

    pid: int
    started: int  # clock ticks since the machine started
    machine: str
    host: str

    @classmethod
    def current(cls) -> Owner:
        """Return this process."""
        return cls(os.getpid(), start_ticks(os.getpid()) or 0, machine_id(), socket.gethostname())

    @property
    def is_local(self) -> bool:
        """Whether the process was started on this machine, since its last reboot."""
        return self.machine == machine_id()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs on this machine."""
        return self.is_local and start_ticks(self.pid) == self.started


def write_launcher(run_dir: Path) -> None:
    """Write that this process is the launcher of a run."""
    write_json(run_dir / OWNER, asdict(Owner.current()))


def write_agent(run_dir: Path) -> None:
    """Write that this process is the agent of a run's first node."""
    path = agent_owner_path(run_dir)
    with suppress(OSError):  # A full disk must not keep the agent from reporting the run's error.
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(Owner.current()))


def read_launcher(run_dir: Path) -> Owner | None:
    """Return the launcher of a run's latest attempt; None if it is not known."""
    return read_dataclass(Owner, run_dir / OWNER)


def read_agent(run_dir: Path) -> Owner | None:
    """Return the agent of a run's first node; None if it is not known."""
    return read_dataclass(Owner, agent_owner_path(run_dir))


def wait_for_agent(run_dir: Path) -> str | None:
    """Wait for the agent of a launcher that was killed; return which process it is if it does not end.

    It ends its workers and writes the record of its attempt.
    """
    deadline = time.monotonic() + AGENT_TIMEOUT_S
    while (agent := read_agent(run_dir)) is not None and agent.is_alive:
        if time.monotonic() > deadline:
            return f"process {agent.pid} on {agent.host}"
        time.sleep(POLL_S)
    return None

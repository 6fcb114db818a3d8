"""Start and stop of child processes; a child never outlives its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn, Protocol

import psutil

from distexp.config.paths import PACKAGE

PR_SET_PDEATHSIG = 1
NOTICE_SIGNAL = signal.SIGUSR2
"""Signal that Slurm sends before it ends a job; submitit requests this one."""

KILL_S = 10.0
"""Longest time to wait for the end of a killed process. One that waits for a file system may take forever."""

_libc = ctypes.CDLL(None, use_errno=True)


def end_at_once(code: int) -> NoReturn:
    """Write the output, and end this process without Python's cleanup.

    After an import of torch, the cleanup takes a third of a second, and threads of its libraries may abort it.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # The log may be on a full disk.
            stream.flush()
    os._exit(code)


def start_module(
    module: str,
    *arguments: str,
    env: Mapping[str, str],
    output: IO[str] | None = None,
    death_signal: signal.Signals = signal.SIGKILL,
    sockets: Sequence[socket.socket] = (),
) -> subprocess.Popen[bytes]:
    """Start ``python -m module`` in a new session, with this distexp on its PYTHONPATH.

    The child receives ``death_signal`` when this process dies. The kernel binds that signal to the *thread* that
    starts the child, so call this from the main thread.

    Args:
        module: Name of the module.
        arguments: Command line of the module.
        env: Environment of the child.
        output: File for stdout and stderr; None inherits both.
        death_signal: Signal for the child when this process dies.
        sockets: Sockets that the child gets, with the same file descriptors.

    Returns:
        The child process.
    """
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), env.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env={**env, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output is not None else None,
        start_new_session=True,
        pass_fds=[each.fileno() for each in sockets],
        preexec_fn=_bind_to_parent(death_signal),  # noqa: PLW1509
    )


def _bind_to_parent(number: signal.Signals) -> Callable[[], None]:
    def bind() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, number)
        # Slurm signals every process of a job before it ends the job. Only the agent must react.
        signal.signal(NOTICE_SIGNAL, signal.SIG_IGN)

    return bind


def die_with_parent(number: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """Request a signal for the death of the parent process; send it now if the parent is already dead.

    Args:
        number: The signal.
        parent: Id of the parent if it is known. It may be 1, as in a container.
    """
    expected = os.getppid() if parent is None else parent
    _libc.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != expected or (parent is None and orphaned()):
        os.kill(os.getpid(), number)


def start_ticks(pid: int) -> int | None:
    """Return the start of a process in clock ticks since boot; None if it does not exist or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    cells = stat.rpartition(")")[2].split()
    return None if cells[0] in "ZX" else int(cells[19])


def machine_id() -> str:
    """Return an identity of this machine since its last boot, and of the container in which process ids count."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def orphaned() -> bool:
    """Return whether the parent of this process has died."""
    return os.getppid() == 1


def descendants(pid: int, *, recursive: bool = True) -> list[psutil.Process]:
    """Return the descendants of a process, or only its children; empty if it does not exist."""
    try:
        return psutil.Process(pid).children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


class WatchedProcess(Protocol):
    """A process that this one has started, or had started. It has these methods of a ``Popen``."""

    @property
    def pid(self) -> int:
        """Return its id, which no other process gets before its end is known here."""

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""

    def wait(self) -> int:
        """Wait for the end and return the exit code."""

    def send_signal(self, number: int, /) -> None:
        """Send a signal if the process runs."""

    def kill(self) -> None:
        """Send SIGKILL if the process runs."""


def end_tree(process: WatchedProcess, grace_s: float) -> None:
    """End a child process and all its descendants, and wait for their end.

    Args:
        process: The child.
        grace_s: Seconds between SIGTERM for the child and SIGKILL for every process that is left.
    """
    family = {member.pid: member for member in descendants(process.pid)}
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and (process.poll() is None or any(map(_is_alive, family.values()))):
        family |= {member.pid: member for member in descendants(process.pid)}
        time.sleep(0.05)
    left = [member for member in family.values() if _is_alive(member)]
    for member in left:
        with suppress(psutil.NoSuchProcess):  # It may have ended by itself meanwhile.
            member.kill()
    if process.poll() is None:
        process.kill()
    process.wait()
    deadline = time.monotonic() + KILL_S
    while any(map(_is_alive, left)) and time.monotonic() < deadline:
        time.sleep(0.05)


def kill_tree(pid: int) -> None:
    """Kill a child process and all its descendants. It waits for none of them."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)  # It starts no further process.
    for member in descendants(pid):
        with suppress(psutil.NoSuchProcess):
            member.kill()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

"""Start and end of Python processes; a child never outlives its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, NoReturn

from distexp.config.paths import PACKAGE

PR_SET_PDEATHSIG = 1
"""Option of ``prctl(2)`` that sets the signal for the death of the parent."""

NOTICE_SIGNAL = signal.SIGUSR2
"""Signal that Slurm sends before it ends a job; submitit requests this one."""

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
    inherited: Sequence[int] = (),
    command: Callable[[Sequence[str]], Sequence[str]] | None = None,
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
        inherited: File descriptors that the child gets too.
        command: Returns the whole command, from the arguments of Python; None: this Python.

    Returns:
        The child process.
    """
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), env.get("PYTHONPATH")]))
    python = ("-m", module, *arguments)
    return subprocess.Popen(
        [sys.executable, *python] if command is None else command(python),
        env={**env, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output is not None else None,
        start_new_session=True,
        pass_fds=inherited,
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


def orphaned() -> bool:
    """Return whether the parent of this process has died."""
    return os.getppid() == 1

"""Starting processes that never outlive who started them, and ending them for certain."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO

import psutil

from distexp.config.paths import PACKAGE

PR_SET_PDEATHSIG = 1
NOTICE_SIGNAL = signal.SIGUSR2
"""What Slurm sends before it ends a job; submitit's choice."""

_libc = ctypes.CDLL(None, use_errno=True)


def start_module(
    module: str,
    *arguments: str,
    env: Mapping[str, str],
    output: IO[str] | None = None,
    death_signal: signal.Signals = signal.SIGKILL,
) -> subprocess.Popen[bytes]:
    """Starts ``python -m module``, with this distexp importable, in a session of its own.

    The child gets ``death_signal`` when this process dies. The kernel ties that to the *thread* that
    starts the child, so call this from the main one, and before others run.
    """
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), env.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env={**env, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output is not None else None,
        start_new_session=True,
        preexec_fn=_tied(death_signal),  # noqa: PLW1509
    )


def _tied(number: signal.Signals) -> Callable[[], None]:
    def tie() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, number)
        # Slurm announces the end of a job to every process of it, and only the agent is to answer.
        signal.signal(NOTICE_SIGNAL, signal.SIG_IGN)

    return tie


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Has the kernel send this process a signal when its parent dies, or sends it now if that is past."""
    parent = os.getppid()
    _libc.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent or orphaned():
        os.kill(os.getpid(), number)


def orphaned() -> bool:
    """Whether the process that started this one is gone."""
    return os.getppid() == 1


def descendants(pid: int, *, recursive: bool = True) -> list[psutil.Process]:
    """All processes below one, or its children; empty where it is gone."""
    try:
        return psutil.Process(pid).children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


def end_tree(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Ends a child and everything below it: SIGTERM, then SIGKILL for what is left after the grace."""
    family = {member.pid: member for member in descendants(process.pid)}
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and (process.poll() is None or any(map(_lives, family.values()))):
        family |= {member.pid: member for member in descendants(process.pid)}
        time.sleep(0.05)
    for member in family.values():
        if _lives(member):
            member.kill()
    if process.poll() is None:
        process.kill()
    process.wait()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

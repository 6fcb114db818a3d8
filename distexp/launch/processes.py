"""Starting processes that never outlive who started them, and ending them for certain."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import IO

import psutil

from distexp.paths import PACKAGE

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def start_module(
    module: str, *arguments: str, env: Mapping[str, str], output: IO[str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts ``python -m module``, with this distexp importable, to be killed when this process dies.

    The kernel ties the child's life to the *thread* that starts it, so call this from the main one.
    """
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), env.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env={**env, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output is not None else None,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent dies; nothing is left behind then."""
    parent = os.getppid()
    _die_with_parent()
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(1)


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below one; empty where it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def end_tree(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Ends a child and everything below it: SIGTERM, then SIGKILL for what is left after the grace."""
    family = [*descendants(process.pid)]
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and (process.poll() is None or any(_runs(p) for p in family)):
        family += [p for p in descendants(process.pid) if p not in family]
        time.sleep(0.05)
    for member in family:
        if _runs(member):
            member.kill()
    if process.poll() is None:
        process.kill()
    process.wait()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

"""Survival of a closed terminal: local runs continue, and their output moves to a log."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from distexp.runs.command_text import suggest_command
from distexp.runs.run_dir import LAUNCHER_LOG
from distexp.system.signals import handle_signals


@contextmanager
def continue_after_hangup(folder: Path) -> Iterator[None]:
    """Keep the runs below a folder after SIGHUP, which a closed terminal sends.

    The output continues in ``launcher.log`` of the folder, because the terminal can no longer be written. The same
    holds for a pipe, because its reader, such as ``tee``, gets the signal too and ends. A signal that the user has
    ignored (``nohup``) stays ignored.
    """
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
        yield
        return
    lost = [descriptor for descriptor in (1, 2) if os.isatty(descriptor) or _is_pipe(descriptor)]
    received: list[int] = []

    def leave_terminal(number: int, frame: FrameType | None) -> None:
        if not received:  # The kernel may send the signal to the session and to the process group.
            received.append(number)
            _continue_in_log(folder, lost)

    with handle_signals(leave_terminal, signal.SIGHUP):
        yield


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:  # It is closed.
        return False


def _continue_in_log(folder: Path, lost: Sequence[int]) -> None:
    """Redirect the output to a log, and start the log with how to follow and to end the runs.

    Args:
        folder: Folder of the runs.
        lost: File descriptors to redirect. Output to a file stays as it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / LAUNCHER_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in lost:
        os.dup2(log, descriptor)
    os.close(log)
    message = (
        f"the terminal was closed (SIGHUP), and the runs continue. To look at them: "
        f"{suggest_command('status', folder)}. To end them: {suggest_command('cancel', folder)}\n"
    )
    os.write(sys.stdout.fileno(), message.encode())  # A signal handler must not use the buffer of print.

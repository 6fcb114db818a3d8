"""Local runs continue when their terminal is closed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from distexp.runs.command_text import suggest_command
from distexp.runs.run_dir import LAUNCHER_LOG


@contextmanager
def continue_after_hangup(folder: Path) -> Iterator[None]:
    """Keep the runs below a folder after SIGHUP, which a closed terminal sends.

    The output continues in ``launcher.log`` of the folder, because the terminal can no longer be written. A signal
    that the user has ignored (``nohup``) stays ignored.
    """
    received: list[int] = []
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def leave_terminal(number: int, frame: FrameType | None) -> None:
        if number in received:  # The kernel may send it to the session and to the process group.
            return
        received.append(number)
        folder.mkdir(parents=True, exist_ok=True)
        log = os.open(folder / LAUNCHER_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for terminal in terminals:
            os.dup2(log, terminal)
        os.close(log)
        os.write(
            sys.stdout.fileno(),
            f"the terminal was closed (SIGHUP), and the runs continue. To look at them: "
            f"{suggest_command('status', folder)}. To end them: {suggest_command('cancel', folder)}\n".encode(),
        )

    before = signal.getsignal(signal.SIGHUP)
    if before is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGHUP, leave_terminal)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)

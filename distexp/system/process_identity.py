"""Identity of a process and of this machine, so that a later process with the same id is not taken for it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

START_TIME = 18
"""Position of ``starttime`` in ``/proc/PID/stat``, counted from the field after the state."""


def start_ticks(pid: int) -> int | None:
    """Return the start of a process in clock ticks since boot; None if it does not exist or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    state, *numbers = stat.rpartition(")")[2].split()  # The name before may contain spaces.
    return None if state in "ZX" else int(numbers[START_TIME])


def machine_id() -> str:
    """Return an identity of this machine since its last boot, and of the container in which process ids count."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()

"""A command on a pseudo terminal, and what a terminal shows of its output."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([^\x1b])")
LONGEST_S = 300.0


class Terminal:
    """A command that runs on a pseudo terminal."""

    def __init__(self, command: Sequence[str], folder: Path, width: int, environment: Mapping[str, str]) -> None:
        """Start a command in a folder."""
        self.output = ""
        self.pid, self._file = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # A test in the background ignores it.
            os.chdir(folder)
            os.execvpe(command[0], list(command), {"TERM": "xterm-256color", **environment})
        self.resize(width)

    def resize(self, width: int) -> None:
        """Change the width of the terminal; the kernel sends SIGWINCH."""
        fcntl.ioctl(self._file, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))

    def press(self, keys: str) -> None:
        """Write some keys to the terminal."""
        os.write(self._file, keys.encode())

    def read_until(self, text: str) -> None:
        """Read the output until it contains a text after what was read before."""
        start = len(self.output)
        while text not in self.output[start:]:
            assert self._read(), f"{text!r} did not appear: {self.output[-2000:]}"

    def wait(self) -> int:
        """Read the output until the end, and return the exit code."""
        while self._read():
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self) -> bool:
        if not select.select([self._file], [], [], LONGEST_S)[0]:
            os.kill(self.pid, signal.SIGKILL)
            raise TimeoutError(self.output[-2000:])
        try:
            added = os.read(self._file, 65536)
        except OSError:  # The command has ended.
            return False
        self.output += added.decode(errors="replace")
        return bool(added)


def shown_lines(output: str) -> list[str]:
    """Return the lines that a terminal of any width shows at the end, without colors."""
    rows, row, column = [""], 0, 0
    for found in CONTROL.finditer(output):
        number, command, character = found.groups()
        if command == "K" and number == "2":
            rows[row] = ""
        elif command == "A":
            row = max(0, row - int(number or 1))
        elif character == "\r":
            column = 0
        elif character == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif character is not None:
            rows[row] = rows[row].ljust(column)[:column] + character + rows[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in rows]

"""Commands that may hang, run with a timeout."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

TOOL_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class CommandResult:
    """Exit code and output of a command."""

    code: int | None  # None: timeout, or the command could not be started
    output: str
    errors: str

    @property
    def error_line(self) -> str:
        """Return the last line of stderr, or of stdout if stderr is empty: the likely reason of a failure."""
        lines = [line.strip() for line in (self.errors or self.output).splitlines() if line.strip()]
        return lines[-1] if lines else "no output"


def run_command(command: Sequence[str], timeout_s: float) -> CommandResult:
    """Run a command, then kill everything it started; never raise.

    Args:
        command: Program and arguments.
        timeout_s: Seconds after which the command is killed.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
            )
        except OSError as error:
            return CommandResult(None, "", str(error))
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        errors.seek(0)
        return CommandResult(code, output.read(), errors.read())

"""What a check hands back, and how it asks programs that may hang."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

GIB = 2**30
TOOL_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Finding:
    """What a check found; ``mend`` says what to do where the state is not ok."""

    name: str
    state: str  # ok, warning, missing
    found: str
    mend: str | None = None


def ok(name: str, found: str) -> Finding:
    """All is well."""
    return Finding(name, "ok", found)


def warning(name: str, found: str, mend: str) -> Finding:
    """It works in part, or not well."""
    return Finding(name, "warning", found, mend)


def missing(name: str, found: str, mend: str) -> Finding:
    """It is not there, or does not work at all."""
    return Finding(name, "missing", found, mend)


@dataclass(frozen=True)
class Answer:
    """What a process said before it ended or its time was up."""

    code: int | None  # None: its time was up, or it could not be started
    output: str
    errors: str

    @property
    def last_words(self) -> str:
        """The line that most likely says why it failed."""
        lines = [line.strip() for line in (self.errors or self.output).splitlines() if line.strip()]
        return lines[-1] if lines else "without a word"


def ask(command: Sequence[str], timeout_s: float) -> Answer:
    """Runs a command and everything that it starts for so many seconds at most; it never raises."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
            )
        except OSError as error:
            return Answer(None, "", str(error))
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
        return Answer(code, output.read(), errors.read())

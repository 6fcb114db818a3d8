"""Build of a strategy's C++ operators on a node, before its workers and its memory sampler start.

A compiler takes minutes and gigabytes. A run that compiled while it is measured would report the compiler's memory.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from distexp.launch.operator_marks import mark_built
from distexp.runs.jsonl import Entry, Tail
from distexp.strategies import ds_operators
from distexp.system.process_shutdown import end_tree
from distexp.system.processes import start_module

MESSAGE = re.compile(rf"{ds_operators.REPORT_PREFIX} (compiling|built|skipped|waiting for) (\S+) ?(.*)")
"""Line of the process that builds: what happens, an operator, and the rest, which is the library or a reason."""

STEP = re.compile(r"\[(?P<step>\d+)/(?P<steps>\d+)\] ")
"""Line of Ninja."""

ERROR = re.compile(r"\b(fatal )?error:|^\w*Error\b|not found", re.IGNORECASE)
"""Line of the compiler or of Python that names an error."""

BUILD_TIMEOUT_S = 25 * 60.0
REPORT_EVERY_S = 5.0
POLL_S, GRACE_S = 0.2, 2.0


class OperatorError(Exception):
    """An operator that could not be compiled."""


def build_operators(
    names: Sequence[str], environment: Mapping[str, str], log: Path, report: Callable[[Entry], None]
) -> None:
    """Build operators in a process that ends with this one; call it from the main thread.

    Args:
        names: Names of DeepSpeed's operators.
        environment: Environment of the workers.
        log: File for the output of the compiler.
        report: Gets each change: ``compiling`` with an operator, ``step`` and ``steps``, ``waiting`` with the reason,
            ``elapsed_s`` every few seconds, and at the end ``compiled_s``, or ``waited_s`` if another run compiled.

    Raises:
        OperatorError: if the build fails or takes longer than ``BUILD_TIMEOUT_S``.
    """
    with log.open("w") as output:
        process = start_module(ds_operators.MODULE, *names, env=environment, output=output)
    try:
        _Build(names, environment, log, report).follow(process)
    finally:
        end_tree(process, GRACE_S)


class _Build:
    """A build, followed through its log."""

    def __init__(
        self, names: Sequence[str], environment: Mapping[str, str], log: Path, report: Callable[[Entry], None]
    ) -> None:
        self.names, self.environment, self.log, self.report = names, environment, log, report
        self.tail, self.started, self.compiles, self.waits = Tail(log), time.monotonic(), False, False

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Report each step until the process ends, and mark what it has built.

        Raises:
            OperatorError: if the build fails or takes too long.
        """
        reported_s = 0.0
        while process.poll() is None:
            self._read()
            if self.elapsed_s > BUILD_TIMEOUT_S:
                raise OperatorError(self._failure(f"it took longer than {BUILD_TIMEOUT_S / 60:.0f} minutes"))
            if self.compiles and self.elapsed_s - reported_s >= REPORT_EVERY_S:
                reported_s = self.elapsed_s
                self.report({"elapsed_s": round(self.elapsed_s)})
            time.sleep(POLL_S)
        self._read()
        if process.returncode:
            raise OperatorError(self._failure(_reason(self.log)))
        if self.compiles:
            self.report({"compiled_s": round(self.elapsed_s)})
        elif self.waits:
            self.report({"waited_s": round(self.elapsed_s)})

    def _read(self) -> None:
        for line in self.tail.read_lines():
            if message := MESSAGE.match(line):
                self._handle(*message.groups())
            elif step := STEP.match(line):
                self.compiles = True
                self.report(
                    {"step": int(step["step"]), "steps": int(step["steps"]), "elapsed_s": round(self.elapsed_s)}
                )

    def _handle(self, kind: str, name: str, rest: str) -> None:
        if kind == "compiling":
            self.compiles = True
            self.report({"compiling": name})
        elif kind == "waiting for":
            self.waits = True
            self.report({"waiting": f"{name} {rest}".strip()})
        else:
            mark_built(name, self.environment, rest or None)

    def _failure(self, reason: str) -> str:
        return (
            f"DeepSpeed's operators ({', '.join(self.names)}) could not be compiled: {reason}. The output of the "
            f"compiler is in {self.log}: check the compiler with distexp doctor, or choose another strategy"
        )


def _reason(log: Path) -> str:
    """Return the first line of a log that names an error, else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return next((line for line in lines if ERROR.search(line)), lines[-1] if lines else "no output")[:300]

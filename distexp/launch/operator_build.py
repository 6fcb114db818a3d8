"""C++ operators of a strategy: compiled on a node before its workers and its memory sampler start.

A compiler takes minutes and gigabytes. A run that compiled while it is measured would report the compiler's memory.
The marks of built operators are in PyTorch's cache of extensions, so that a later run does not import torch to check.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from distexp.runs.json_files import write_json
from distexp.runs.jsonl import Entry, Tail
from distexp.strategies.ds_build_folder import BATON
from distexp.system.process_shutdown import end_tree
from distexp.system.processes import start_module

BUILDER = "distexp.strategies.ds_operators"
MESSAGE = re.compile(r"distexp: (compiling|built|skipped|waiting for) (\S+) ?(.*)")
STEP = re.compile(r"\[(\d+)/(\d+)\] ")
NINJA_FILE = "build.ninja"
ERROR = re.compile(r"\b(fatal )?error:|^\w*Error\b|not found", re.IGNORECASE)

TIMEOUT_S = 25 * 60.0
REPORT_EVERY_S = 5.0
POLL_S, GRACE_S = 0.2, 2.0

STEERING = ("DS_ACCELERATOR", "TORCH_CUDA_ARCH_LIST", "CXX", "CC", "CUDA_HOME")
"""Environment variables that change what is compiled."""


class OperatorError(Exception):
    """An operator that could not be compiled."""


def missing_operators(names: Iterable[str], environment: Mapping[str, str]) -> list[str]:
    """Return the operators that are not known to be built; none without DeepSpeed, which a worker then reports.

    Args:
        names: Names of DeepSpeed's operators.
        environment: Environment of the workers.
    """
    if not _installation("deepspeed"):
        return []
    return [name for name in names if not _is_built(_mark_path(name, environment))]


def _is_built(mark: Path) -> bool:
    """Return whether the library is the one that was built when the mark was written, and no process builds it.

    Environments with other paths share the cache. Ninja compiles again after another one has built. The lock may be
    that of a killed process, for which all workers would wait.
    """
    try:
        entry = json.loads(mark.read_text())
        library = entry["library"]
        return library is None or (entry == _describe(library) and not Path(library).with_name(BATON).exists())
    except (OSError, ValueError, KeyError):
        return False


def _describe(library: str | None) -> dict[str, Any]:
    """Return the content of the mark of a library."""
    if library is None:
        return {"library": None}
    return {"library": library, "size": Path(library).stat().st_size, "plan": _plan(library)}


def _plan(library: str) -> str | None:
    """Return the hash of Ninja's file next to a library; None if there is none."""
    try:
        return hashlib.sha256(Path(library).with_name(NINJA_FILE).read_bytes()).hexdigest()
    except OSError:
        return None


def _mark_path(name: str, environment: Mapping[str, str]) -> Path:
    """Return the file that marks an operator as built with these versions and this environment."""
    root = environment.get("TORCH_EXTENSIONS_DIR")
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(root) if root else Path(cache).expanduser() / "torch_extensions"
    settings = [platform.python_version(), platform.machine(), _installation("torch"), _installation("deepspeed")]
    settings += [environment.get(variable, "") for variable in STEERING]
    key = hashlib.sha256("\n".join(settings).encode()).hexdigest()[:12]
    return folder / f"distexp-{name}-{key}.json"


def _installation(package: str) -> str:
    """Return the version and the folder of an installed package; empty if it is not installed."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return ""
    return f"{found.version} {found.locate_file('')}"


def build_operators(
    names: Sequence[str], environment: Mapping[str, str], log: Path, report: Callable[[Entry], None]
) -> None:
    """Build operators in a process that ends with this one; call it from the main thread.

    Args:
        names: Names of DeepSpeed's operators.
        environment: Environment of the workers.
        log: File for the output of the compiler.
        report: Gets each change: ``compiling`` with an operator, ``step`` and ``steps``, ``waiting`` with the reason,
            ``elapsed_s`` every few seconds, and at the end ``compiled_s``.

    Raises:
        OperatorError: if the build fails or takes longer than ``TIMEOUT_S``.
    """
    with log.open("w") as output:
        process = start_module(BUILDER, *names, env=environment, output=output)
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
        self.tail, self.started, self.compiles = Tail(log), time.monotonic(), False

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        reported_s = 0.0
        while process.poll() is None:
            self._read()
            if self.elapsed_s > TIMEOUT_S:
                raise OperatorError(self._failure(f"it took longer than {TIMEOUT_S / 60:.0f} minutes"))
            if self.compiles and self.elapsed_s - reported_s >= REPORT_EVERY_S:
                reported_s = self.elapsed_s
                self.report({"elapsed_s": round(self.elapsed_s)})
            time.sleep(POLL_S)
        self._read()
        if process.returncode:
            raise OperatorError(self._failure(_reason(self.log)))
        if self.compiles:
            self.report({"compiled_s": round(self.elapsed_s)})

    def _read(self) -> None:
        for line in self.tail.read_lines():
            if message := MESSAGE.match(line):
                self._handle(*message.groups())
            elif step := STEP.match(line):
                self.compiles = True
                self.report({"step": int(step[1]), "steps": int(step[2]), "elapsed_s": round(self.elapsed_s)})

    def _handle(self, kind: str, name: str, rest: str) -> None:
        if kind == "compiling":
            self.compiles = True
            self.report({"compiling": name})
        elif kind == "waiting for":
            self.report({"waiting": f"{name} {rest}".strip()})
        else:
            with suppress(OSError):  # Without a mark, the next run checks again.
                write_json(_mark_path(name, self.environment), _describe(rest or None))

    def _failure(self, reason: str) -> str:
        return (
            f"DeepSpeed's operators ({', '.join(self.names)}) could not be compiled: {reason}. The output of the "
            f"compiler is in {self.log}: check the compiler with distexp doctor, or choose another strategy"
        )


def _reason(log: Path) -> str:
    """Return the first line of a log that names an error, else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return next((line for line in lines if ERROR.search(line)), lines[-1] if lines else "no output")[:300]


def current_environment(device: str) -> dict[str, str]:
    """Return the environment in which a run on a device would build without settings of its own."""
    return {**os.environ, "DS_ACCELERATOR": device}

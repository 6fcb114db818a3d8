"""Commands in a process that has already imported distexp, Hydra and torch: a command takes a fifth of the CPU time."""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from typing import IO, Any

from distexp.system.cgroups import visible_gpus
from distexp.system.processes import start_module
from tests.helpers.forked_start import LIBRARIES, ForkedProcess, has_same_imports

TIMEOUT_S = 900.0
"""Time for a command. Only a broken one needs it, also on a busy machine."""
PRELOAD = [
    "distexp.cancel",
    "distexp.cli.run",
    "distexp.cli.dispatch",
    "distexp.launch.local.runner",
    "distexp.launch.local.sweep",
    "distexp.resolve",
    "distexp.resume",
    "distexp.status",
    "hydra.main",
    "hydra_plugins.distexp_plugin.launcher",
    "hydra_plugins.distexp_plugin.sweeper",
    "tests.helpers.forked_cli",
    "tests.helpers.forked_start",
]


def _start_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *(() if visible_gpus() else LIBRARIES)])
    return context


SERVER = _start_server()


def run_forked(
    *arguments: str,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    module: str = "distexp",
    timeout: float = TIMEOUT_S,
) -> CompletedProcess[str]:
    """Run ``python -m module`` in a directory, without the start of an interpreter.

    Args:
        arguments: The command line.
        cwd: The directory.
        env: Further environment variables. Those that Python reads when it starts have no effect, except PYTHONPATH.
        module: The module.
        timeout: Time in seconds after which the command is killed, and the test fails.
    """
    with TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        process = ServedProcess(module, arguments, {**os.environ, **(env or {})}, *outputs, cwd=cwd)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired as expired:
            process.kill()
            texts = "".join(path.read_text() for path in outputs)
            raise AssertionError(f"{module} {arguments} did not end in {timeout:.0f} s:\n{texts[-6000:]}") from expired
        return CompletedProcess([module, *arguments], code, *(path.read_text() for path in outputs))


class ServedProcess:
    """A module that runs in a fork of the server, with the methods of a ``Popen`` that the tests and distexp use.

    Args:
        module: The module.
        arguments: Its command line.
        environment: Its environment.
        stdout: The file of its output. Without one, the output is lost.
        stderr: The file of its errors; default: ``stdout``.
        cwd: Its directory.
        session: Whether it has a session of its own.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        stdout: Path = Path(os.devnull),
        stderr: Path | None = None,
        *,
        cwd: Path,
        session: bool = False,
    ) -> None:
        outputs = (str(stdout), str(stderr or stdout))
        options = ([module, *arguments], str(cwd), dict(environment), outputs, session)
        self._process = SERVER.Process(target=_run, args=options)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def serve_module(
    module: str, *arguments: str, env: Mapping[str, str], output: IO[str], **options: Any
) -> ServedProcess | subprocess.Popen[bytes]:
    """Start a module as ``distexp.system.processes.start_module`` does, in a fork of the server if that is the same."""
    if not has_same_imports(env):
        return start_module(module, *arguments, env=env, output=output, **options)
    return ServedProcess(module, arguments, env, Path(output.name), cwd=Path.cwd(), session=True)


def _run(
    command: Sequence[str], cwd: str, environment: Mapping[str, str], outputs: Sequence[str], session: bool
) -> None:
    module = command[0]
    gc.freeze()  # A collection would visit the objects of all libraries.
    if session:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in enumerate(outputs, start=1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    subprocess.Popen = ForkedProcess  # type: ignore[misc]
    sys.path[:0] = [cwd, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [*command]
    if module != "distexp":
        sys.modules.pop(module, None)  # runpy warns of a module that is imported already
    runpy.run_module(module, run_name="__main__", alter_sys=True)

"""Commands in a process that has already imported distexp, Hydra and torch: a command takes a fifth of the CPU time."""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

from distexp.system.cgroups import visible_gpus
from tests.helpers.forked_start import LIBRARIES, ForkedProcess

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
    environment = {**os.environ, **(env or {})}
    with TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        process = SERVER.Process(target=_run, args=(module, arguments, str(cwd), environment, [*map(str, outputs)]))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise AssertionError(f"{module} {arguments} did not end in {timeout:.0f} s")
        return CompletedProcess([module, *arguments], process.exitcode, *(path.read_text() for path in outputs))


def _run(
    module: str, arguments: Sequence[str], cwd: str, environment: Mapping[str, str], outputs: Sequence[str]
) -> None:
    gc.freeze()  # A collection would visit the objects of all libraries.
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in enumerate(outputs, start=1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    subprocess.Popen = ForkedProcess  # type: ignore[misc]
    sys.path[:0] = [cwd, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [module, *arguments]
    if module != "distexp":
        sys.modules.pop(module, None)  # runpy warns of a module that is imported already
    runpy.run_module(module, run_name="__main__", alter_sys=True)

"""The command line in a process that has already imported it: a command takes half as long."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

TIMEOUT_S = 300.0
PRELOAD = [
    "distexp.cli.run",
    "distexp.cli.dispatch",
    "distexp.launch.local.sweep",
    "distexp.resolve",
    "hydra.main",
    "hydra_plugins.distexp_plugin.launcher",
    "hydra_plugins.distexp_plugin.sweeper",
    "tests.helpers.forked_cli",
]


def _start_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


SERVER = _start_server()


def run_forked(*arguments: str, cwd: Path) -> CompletedProcess[str]:
    """Run ``python -m distexp`` in a directory, without the start of an interpreter."""
    with TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        process = SERVER.Process(target=_run, args=(arguments, str(cwd), dict(os.environ), [*map(str, outputs)]))
        process.start()
        process.join(TIMEOUT_S)
        assert process.exitcode is not None, f"distexp {arguments} did not end in {TIMEOUT_S:.0f} s"
        return CompletedProcess(arguments, process.exitcode, *(path.read_text() for path in outputs))


def _run(arguments: Sequence[str], cwd: str, environment: Mapping[str, str], outputs: Sequence[str]) -> None:
    from distexp.cli.main import main

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in enumerate(outputs, start=1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    sys.argv = ["distexp", *arguments]
    sys.exit(main())

"""The ranks of a gloo group, forked from one process that has imported the libraries: ``forked_ranks N SCRIPT DIR``.

It does for a script of the tests what ``distexp.worker.group`` does for a run. torchrun would import torch,
transformers and DeepSpeed once more in each rank, which takes longer than most trainings of the tests.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import tempfile
from pathlib import Path

from distexp.launch.node_setup import EXTENSIONS_DIR, build_operators, current_environment, missing_operators
from distexp.runs.record import RunSpec
from distexp.strategies.base import load_strategy
from distexp.strategies.zero.ds_operators import SHARED_MEMORY
from distexp.system.processes import die_with_parent
from distexp.worker.group import set_torchrun_defaults
from distexp.worker.preload import own_modules, preload
from tests.helpers.forked_start import run_and_exit

DUMP_AFTER_S = 600.0
"""Less than the time after which the tests end the ranks."""


def main() -> int:
    """Run all ranks; return 0 if every one of them ends with 0, else 1."""
    workers, script, *arguments = sys.argv[1:]
    set_torchrun_defaults()
    sys.path.insert(0, str(Path(script).parent))  # as if the script were started
    preload_all(arguments)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), WORLD_SIZE=workers, LOCAL_WORLD_SIZE=workers)
    os.environ.update(GROUP_RANK="0")
    pids = {start_rank(rank, script, arguments) for rank in range(int(workers))}
    failed = False
    while pids:
        pid, status = os.wait()
        pids.discard(pid)
        failed |= status != 0
        if failed:  # the other ranks may wait for it
            for other in pids:
                os.kill(other, signal.SIGKILL)
    return int(failed)


def free_port() -> str:
    """Return a port that no process uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def preload_all(folders: list[str]) -> None:
    """Import what the runs in some folders need, and exclude it from the garbage collection of the ranks."""
    operators = {SHARED_MEMORY}
    for folder in map(Path, folders):
        for spec in sorted(folder.glob("*/spec.json")):
            config = RunSpec.read(spec.parent).config
            preload(own_modules(config), config.cluster.device)
            operators |= set(load_strategy(config).operators(config))
    build_missing(sorted(operators))
    importlib.import_module("distexp.strategies.zero.ds_import")  # transformers needs it to save a model
    gc.collect()
    gc.freeze()
    # A training ends with this call. Then each collection would visit the objects of all libraries, for half a second.
    gc.unfreeze = lambda: None


def build_missing(operators: list[str]) -> None:
    """Build the operators of DeepSpeed as a run does: a rank that is killed while it builds would block all others."""
    environment = current_environment("cpu")
    os.environ[EXTENSIONS_DIR] = environment[EXTENSIONS_DIR]
    if missing := missing_operators(operators, environment):
        with tempfile.TemporaryDirectory() as folder:
            build_operators(missing, environment, Path(folder) / "operators.log", lambda _: None)


def start_rank(rank: int, script: str, arguments: list[str]) -> int:
    """Fork a rank, which runs a script and never returns here; return its process id."""
    parent = os.getpid()

    def run() -> None:
        die_with_parent(parent=parent)
        faulthandler.dump_traceback_later(DUMP_AFTER_S)  # a rank that hangs shows where
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")

    pid = os.fork()
    if pid == 0:
        run_and_exit(run)
    return pid


if __name__ == "__main__":
    sys.exit(main())

"""The workers of one node: ``python -m distexp.worker.group RUN_DIR NODE ADDRESS PORT``.

This process imports the libraries once and then forks one worker per GPU. So a node reads torch from the disk once,
and a run starts in half the CPU time that one interpreter per worker takes. It waits for the workers, stops the others
after the first failure, and writes down which worker ended first and how.

Importing must not initialize CUDA, because a forked process cannot use the CUDA state of its parent. Modules that are
safe to import ahead name what they need in ``PRELOAD``.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from distexp.config import Config
from distexp.runs.files import write_json
from distexp.runs.run_dir import worker_exits_path
from distexp.runs.spec import RunSpec
from distexp.system.environment_variables import captured_environment
from distexp.system.processes import die_with_parent
from distexp.worker.__main__ import run_worker

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL for the workers that are left after a failure."""

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Makes ``torch.cuda.is_available()`` ask NVML, so that it does not initialize CUDA."""


class _StopWorkers(BaseException):
    """SIGTERM from the agent."""


def main() -> int:
    """Run the workers of a node; return 0 if all of them ended well, else 1."""
    captured_environment()  # before torch and DeepSpeed are imported, which set some of these variables
    run_dir, node = Path(sys.argv[1]).absolute(), int(sys.argv[2])
    die_with_parent()
    spec = RunSpec.read(run_dir)
    preload(spec.config)
    os.environ.update(
        MASTER_ADDR=sys.argv[3],
        MASTER_PORT=sys.argv[4],
        GROUP_RANK=str(node),
        WORLD_SIZE=str(spec.world_size),
        LOCAL_WORLD_SIZE=str(spec.workers_per_node),
    )
    signal.signal(signal.SIGTERM, _stop)
    group = WorkerGroup(worker_exits_path(run_dir, node), first_rank=node * spec.workers_per_node)
    try:
        for local_rank in range(spec.workers_per_node):
            group.start(local_rank, run_dir)
        return group.wait()
    except _StopWorkers:
        group.stop()
        return 1


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _StopWorkers


def preload(config: Config) -> None:
    """Import what every worker of this configuration needs; a module that fails is left to the workers to report."""
    with _cuda_untouched():
        for name in ("torch", "distexp.worker.rank", *_declared(config)):
            try:
                importlib.import_module(name)
            except Exception as error:
                print(f"cannot import {name} ahead of the workers: {error!r}", file=sys.stderr)
    gc.collect()
    gc.freeze()  # the collector of a worker does not touch, and so does not copy, what it shares with the others


def _declared(config: Config) -> Iterator[str]:
    """Yield the modules of the chosen options that belong to distexp, and what they declare as ``PRELOAD``."""
    for target in (config.model._target_, config.dataset._target_, config.strategy._target_, config.engine._target_):
        module = target.rpartition(".")[0]
        if module.split(".")[0] != "distexp":
            continue
        yield module
        yield from getattr(sys.modules.get(module), "PRELOAD", ())


@contextmanager
def _cuda_untouched() -> Iterator[None]:
    before = os.environ.get(NVML_CHECK)
    os.environ[NVML_CHECK] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NVML_CHECK]
        else:
            os.environ[NVML_CHECK] = before


@dataclass(frozen=True)
class WorkerExit:
    """How one worker ended."""

    rank: int
    code: int  # as subprocess: negative for a signal
    unix_time_s: float
    stopped: bool  # the group had already asked it to end


class WorkerGroup:
    """Forked workers of one node.

    Args:
        exits: File for how the workers ended, in the order of time.
        first_rank: Rank of the node's first worker.
    """

    def __init__(self, exits: Path, *, first_rank: int) -> None:
        self._path = exits
        self._first_rank = first_rank
        self._running: dict[int, int] = {}  # process id: rank
        self._exits: list[WorkerExit] = []
        self._stopping = False

    def start(self, local_rank: int, run_dir: Path) -> None:
        """Fork one worker; the child never returns."""
        rank = self._first_rank + local_rank
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(local_rank))
            run_worker(run_dir, launched=True)
        self._running[pid] = rank

    def wait(self) -> int:
        """Wait for all workers; stop the others after the first failure. Return 0 if all ended well, else 1."""
        while self._running:
            self._reap(os.waitpid(-1, 0))
            if self._exits[-1].code != 0:
                self.stop()
        return int(any(worker.code for worker in self._exits))

    def stop(self) -> None:
        """End the workers that still run: SIGTERM, and SIGKILL after ``GRACE_S``."""
        self._stopping = True
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while self._running and time.monotonic() < deadline:
            ended = os.waitpid(-1, os.WNOHANG)
            if ended[0]:
                self._reap(ended)
            else:
                time.sleep(0.02)
        self._signal(signal.SIGKILL)
        while self._running:
            self._reap(os.waitpid(-1, 0))

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._running:
            os.kill(pid, number)

    def _reap(self, ended: tuple[int, int]) -> None:
        pid, status = ended
        rank = self._running.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        self._exits.append(WorkerExit(rank, code, time.time(), self._stopping))
        try:
            write_json(self._path, [asdict(worker) for worker in self._exits])
        except OSError as error:  # A full disk must not keep the group from stopping its workers.
            print(f"{self._path} cannot be written: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

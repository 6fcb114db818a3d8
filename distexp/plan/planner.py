"""Estimates of configurations, from the cache or from a process that traces them. This process never imports torch."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Self

from distexp.config import Config
from distexp.exceptions import InterruptedRunError
from distexp.plan.cache import cache_path, read_estimate, store_estimate
from distexp.plan.estimate import Estimate
from distexp.plan.jobs import LOG, POLL_S, job_path, result_path
from distexp.plan.verdict import planned_gpu
from distexp.runs.json_files import read_json, write_json
from distexp.runs.typed_values import parse_dataclass
from distexp.system.cgroups import available_memory, cpu_limit
from distexp.system.hardware import cpu_count
from distexp.system.process_shutdown import end_tree
from distexp.system.processes import start_module
from distexp.system.signals import handle_signals
from distexp.system.units import GIB

SERVER = "distexp.plan.server"
MEMORY_PER_PROCESS = 3 * GIB
"""Memory that a process may need to trace a model."""

MAX_PROCESSES = 16
"""Most configurations that are traced at a time; a login node has many cores and many users."""

GRACE_S = 1.0

Outcome = Estimate | str
"""An estimate, or why there is none."""


class Planner:
    """Source of estimates: the cache, then one process per configuration. A context manager that ends the processes."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._server: TraceServer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def cached(self, config: Config) -> Estimate | None:
        """Return the cached estimate; None if there is none."""
        return read_estimate(config)

    def count_missing(self, configs: Sequence[Config]) -> int:
        """Return how many different configurations are not in the cache."""
        return sum(not path.exists() for path in {cache_path(config) for config in configs})

    def estimate(self, configs: Sequence[Config], advance: Callable[[], None] = lambda: None) -> list[Outcome]:
        """Return the estimate of each configuration, in their order. Equal ones are traced once.

        Args:
            configs: Resolved configurations.
            advance: Called after each configuration that is not in the cache.
        """
        configs = [with_gpu(config) for config in configs]
        paths = [cache_path(config) for config in configs]
        unique = dict(zip(paths, configs, strict=True))
        found: dict[Path, Outcome] = {}
        for path, config in unique.items():
            estimate = read_estimate(config)
            if estimate is not None:
                found[path] = estimate
        missing = [path for path in unique if path not in found]
        for path, outcome in zip(missing, self.trace([unique[path] for path in missing], advance), strict=True):
            found[path] = outcome
            # The reason why a training was not traced may be gone the next time, such as a missing download.
            if isinstance(outcome, Estimate) and outcome.traced:
                store_estimate(unique[path], outcome)
        return [found[path] for path in paths]

    def trace(self, configs: Sequence[Config], advance: Callable[[], None]) -> list[Outcome]:
        """Trace configurations, as many at a time as cores and memory allow."""
        if not configs:
            return []
        if self._server is None:
            self._server = self._stack.enter_context(started_server(parallel_processes()))
        return self._server.trace(configs, advance)


def with_gpu(config: Config) -> Config:
    """Return a configuration with the GPU to plan for. The process that traces sees no GPU."""
    return replace(config, plan=replace(config.plan, gpu=planned_gpu(config)))


@dataclass
class TraceServer:
    """The process that traces, and its folder."""

    process: subprocess.Popen[bytes]
    folder: Path
    jobs: int = 0

    def trace(self, configs: Sequence[Config], advance: Callable[[], None]) -> list[Outcome]:
        """Trace configurations, and call a function after each one."""
        numbers = range(self.jobs, self.jobs + len(configs))
        self.jobs += len(configs)
        for number, config in zip(numbers, configs, strict=True):
            write_json(job_path(self.folder, number), asdict(config))
        waiting = {result_path(self.folder, number) for number in numbers}
        while waiting:
            ended = self.process.poll() is not None
            done = {path for path in waiting if path.exists()}
            for _ in done:
                advance()
            waiting -= done
            if ended:
                break
            time.sleep(POLL_S)
        return [self._read(result_path(self.folder, number)) for number in numbers]

    def _read(self, path: Path) -> Outcome:
        try:
            result = read_json(path)
        except FileNotFoundError:
            lines = (self.folder / LOG).read_text(errors="replace").strip().splitlines()
            return f"the process that traces failed: {lines[-1] if lines else 'it wrote no message'}"
        return str(result["error"]) if "error" in result else parse_dataclass(Estimate, result["estimate"])


def parallel_processes() -> int:
    """Return how many configurations to trace at a time, by the cores and the memory that are free for this process."""
    cores = min(cpu_count(), int(cpu_limit() or MAX_PROCESSES), MAX_PROCESSES)
    return max(1, min(cores, available_memory() // MEMORY_PER_PROCESS))


@contextmanager
def started_server(processes: int) -> Iterator[TraceServer]:
    """Start the process that traces, and end it with the block. It sees no GPU, and each of its processes one core.

    Raises:
        InterruptedRunError: on a signal that would end this process, after the folder was removed.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    # A signal that is ignored stays ignored, as with nohup.
    ending = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    with (
        handle_signals(_raise_interrupted, *ending),
        tempfile.TemporaryDirectory(prefix="distexp-plan-") as name,
    ):
        folder = Path(name)
        with (folder / LOG).open("w") as log:
            process = start_module(SERVER, name, str(processes), env=environment, output=log)
            try:
                yield TraceServer(process, folder)
            finally:
                end_tree(process, GRACE_S)


def _raise_interrupted(number: int, _: FrameType | None) -> None:
    raise InterruptedRunError(number, " before all predictions were made")

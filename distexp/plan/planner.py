"""Estimates of configurations, from the cache or from a process that traces them. This process never imports torch."""

import copy
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Self

from distexp import __version__
from distexp.config import Config, TrainConfig
from distexp.config.custom_code import custom_packages, library_versions, package_hash
from distexp.exceptions import InterruptedRunError
from distexp.hardware.facts import cublas_workspace, gpu_facts
from distexp.plan.estimate import Estimate, simulated_nodes
from distexp.plan.verdict import planned_gpu
from distexp.resolve.run_id import run_id
from distexp.system import cgroups, files, typed_values, units
from distexp.system.cache_dir import cache_dir
from distexp.system.processes import end_tree, handle_signals, start_module

MEMORY_PER_PROCESS = 3 * units.GIB  # memory that a process may need to trace a model
MAX_PROCESSES = 16  # most configurations that are traced at a time; a login node has many cores and many users
POLL_S = 0.05
LOG = "log.txt"  # output of the process that traces, in its folder
Outcome = Estimate | str  # an estimate, or why there is none


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
        """Return the estimates in the order of the configurations. ``advance`` is called after each uncached one."""
        configs = [with_gpu(config) for config in configs]
        paths = [cache_path(config) for config in configs]
        unique = dict(zip(paths, configs, strict=True))
        cached = {path: read_estimate(config) for path, config in unique.items()}
        found: dict[Path, Outcome] = {path: estimate for path, estimate in cached.items() if estimate is not None}
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
            files.write_json(job_path(self.folder, number), asdict(config))
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
            result = files.read_json(path)
        except FileNotFoundError:
            lines = (self.folder / LOG).read_text(errors="replace").strip().splitlines()
            return f"the process that traces failed: {lines[-1] if lines else 'it wrote no message'}"
        return str(result["error"]) if "error" in result else typed_values.parse_dataclass(Estimate, result["estimate"])


def parallel_processes() -> int:
    """Return how many configurations to trace at a time, by the cores and the memory that are free for this process."""
    cores = min(cgroups.cpu_count(), int(cgroups.cpu_limit() or MAX_PROCESSES), MAX_PROCESSES)
    return max(1, min(cores, cgroups.available_memory() // MEMORY_PER_PROCESS))


@contextmanager
def started_server(processes: int) -> Iterator[TraceServer]:
    """Start the process that traces, without GPUs; end it with the block. A signal raises InterruptedRunError."""

    def interrupt(number: int, _: FrameType | None) -> None:
        raise InterruptedRunError(number, " before all predictions were made")

    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    # A signal that is ignored stays ignored, as with nohup.
    ending = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    with handle_signals(interrupt, *ending), tempfile.TemporaryDirectory(prefix="distexp-plan-") as name:
        folder = Path(name)
        with (folder / LOG).open("w") as log:
            process = start_module("distexp.plan.trace.server", name, str(processes), env=environment, output=log)
            try:
                yield TraceServer(process, folder)
            finally:
                end_tree(process, grace_s=1.0)


SOURCES = (
    *("config", "data", "distributed", "engines", "measure", "models", "plan", "resolve", "strategies", "system"),
    *("training", "worker"),
)
"""Packages whose code an estimate depends on."""

IRRELEVANT = (
    *("learning_rate", "weight_decay", "betas", "eps", "schedule", "step_size", "gamma", "warmup_steps"),
    *("measure_after_step", "log_every", "on_nan", "score_answers", "resume"),
)
"""Keys of ``train`` that do not change an estimate."""

BATCH_KEYS = ("num_epochs", "max_steps", "seed")
"""Keys of ``train`` that decide which samples are in the largest micro-batch."""


def read_estimate(config: Config) -> Estimate | None:
    """Return the cached estimate of a configuration; None if there is none."""
    return typed_values.read_dataclass(Estimate, cache_path(config))  # A damaged file is replaced.


def store_estimate(config: Config, estimate: Estimate) -> None:
    """Keep an estimate. Without a writable cache, print a warning."""
    path = cache_path(config)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, asdict(estimate))
    except OSError as error:
        print(f"distexp: the prediction is not cached: {path.parent}: {error.strerror}", file=sys.stderr)


def cache_path(config: Config) -> Path:
    """Return the file of an estimate for the GPU to plan for."""
    relevant, default = copy.deepcopy(config), TrainConfig()
    for name in IRRELEVANT if _sizes_vary(config) else (*IRRELEVANT, *BATCH_KEYS):
        setattr(relevant.train, name, getattr(default, name))
    key = {
        "run": run_id(relevant),
        "code": code_hash(),
        "custom": [package_hash(name) for name in custom_packages(config)],
        "versions": library_versions(),
        "workspace": cublas_workspace(planned_gpu(config)),
        "multiprocessors": gpu_facts(planned_gpu(config)).multiprocessors,
        "simulated_nodes": simulated_nodes(config),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return cache_dir() / "plan" / f"{digest}.json"


def _sizes_vary(config: Config) -> bool:
    """Return whether the memory of a step depends on the samples of its micro-batch."""
    dataset, train = config.dataset, config.train
    if not config.model.traits.is_text:
        return False
    padded = dataset.padding == "max_length" and not dataset.bucketing and not dataset.packing
    is_custom = not dataset._target_.startswith("distexp.")  # It may pad in another way.
    return is_custom or not padded or train.logits != "all" or train.loss != "full"


@lru_cache(maxsize=1)
def code_hash() -> str:
    """Return a hash of the code that an estimate depends on."""
    digest = hashlib.sha256(__version__.encode())
    for package in SOURCES:
        for path in sorted((files.PACKAGE / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def job_path(folder: Path, number: int) -> Path:
    """Return the file with the configuration of a job."""
    return folder / f"job{number}.json"


def result_path(folder: Path, number: int) -> Path:
    """Return the file with the result of a job."""
    return folder / f"result{number}.json"

"""The process that traces: it imports torch once, then forks a process for each configuration.

``python -m distexp.plan.trace.server FOLDER PROCESSES`` waits for ``FOLDER/job0.json``, ``job1.json`` and so on. Each
has a configuration. The results are ``FOLDER/result0.json`` and so on: ``{"estimate": ...}`` or ``{"error": ...}``. It
runs until it is ended.
"""

import importlib
import itertools
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from distexp.config import Config, ConfigError
from distexp.plan.estimate import arithmetic_estimate, make_estimate
from distexp.plan.planner import POLL_S, job_path, result_path
from distexp.plan.trace.traced_run import count_parameters
from distexp.runs.record import parse_config
from distexp.system.files import read_json, write_json
from distexp.system.processes import die_with_parent, kill_tree, signal_name
from distexp.worker.preload import own_modules, preload

FALLBACK_S = 120.0  # longest time of an estimate by arithmetic, which builds the model again


def main(arguments: Sequence[str] | None = None) -> int:
    """Trace all jobs of a folder, until the process is ended."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    folder, processes = Path(given[0]), int(given[1])
    os.nice(10)  # Others may use the machine, for example a login node.
    importlib.import_module("distexp.plan.trace.tracing")
    running: list[TraceJob] = []
    for number in itertools.count():
        while len(running) >= processes or not job_path(folder, number).exists():
            if not running:
                time.sleep(POLL_S)
            wait([job.process.sentinel for job in running], POLL_S)
            running = [left for job in running if (left := continue_job(job)) is not None]
        config = parse_config(read_json(job_path(folder, number)))
        preload(own_modules(config), config.cluster.device)
        path = result_path(folder, number)
        limit = math.inf if config.plan.timeout_s is None else config.plan.timeout_s
        running.append(TraceJob(_start(_trace, (config, path)), config, path, time.monotonic() + limit))
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class TraceJob:
    """A configuration, and the process that predicts it."""

    process: BaseProcess
    config: Config
    path: Path
    deadline: float  # time of the monotonic clock at which the process is killed
    reason: str = ""  # why the training was not traced; empty if this process traces it


Start = Callable[[Callable[..., None], tuple[Any, ...]], BaseProcess]


def _start(target: Callable[..., None], arguments: tuple[Any, ...]) -> BaseProcess:
    process = get_context("fork").Process(target=target, args=arguments)
    process.start()
    return process


def _trace(config: Config, path: Path) -> None:
    die_with_parent()
    try:
        write_json(path, {"estimate": asdict(make_estimate(config))})
    except ConfigError as error:
        write_json(path, {"error": str(error)})
    except Exception as error:
        traceback.print_exc()
        write_json(path, {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"})


def _estimate_states(config: Config, path: Path, reason: str) -> None:
    die_with_parent()
    write_json(path, {"estimate": asdict(arithmetic_estimate(config, reason, *count_parameters(config)))})


def continue_job(job: TraceJob, start: Start = _start) -> TraceJob | None:
    """Return the job that is left: this one, or the estimate by arithmetic if it left no result; else None."""
    late = time.monotonic() > job.deadline
    if job.process.is_alive():
        if not late:
            return job
        assert job.process.pid is not None, "it was started"
        kill_tree(job.process.pid)
    job.process.join()
    if job.path.exists():
        return None
    if job.reason:
        write_json(job.path, {"error": job.reason})
        return None
    reason = f"the process that traced it ended by {describe_exit(job.process.exitcode or 0)}"
    if late:
        limit = f"plan.timeout_s={job.config.plan.timeout_s:g}"
        reason = f"it took longer than {limit}: set a larger one, or plan.timeout_s=null for no limit"
    # In a process, because it may fail as the trace did.
    fallback = start(_estimate_states, (job.config, job.path, reason))
    return TraceJob(fallback, job.config, job.path, time.monotonic() + FALLBACK_S, reason)


def describe_exit(code: int) -> str:
    """Return how a process ended, with the probable cause."""
    if code >= 0:
        return f"exit code {code}"
    causes: dict[int, str] = {
        signal.SIGKILL: ", possibly because this machine is out of memory",
        signal.SIGSEGV: ", possibly because a custom operator reads the memory of a tensor",
    }
    return signal_name(-code) + causes.get(-code, "")


if __name__ == "__main__":
    sys.exit(main())

"""The process that traces: it imports torch once, then forks a process for each configuration.

``python -m distexp.plan.server FOLDER PROCESSES`` waits for ``FOLDER/job0.json``, ``job1.json`` and so on. Each has a
configuration. The results are ``FOLDER/result0.json`` and so on: ``{"estimate": ...}`` or ``{"error": ...}``. It runs
until it is ended.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from distexp.config import Config, ConfigError
from distexp.plan.estimate import arithmetic_estimate, make_estimate
from distexp.plan.jobs import POLL_S, job_path, result_path
from distexp.plan.untraced import count_parameters
from distexp.runs.files import read_json, write_json
from distexp.runs.spec import typed_config
from distexp.system.processes import die_with_parent
from distexp.worker.group import preload

NICENESS = 10
"""Lower priority of the processes that trace, because others may use the machine, for example a login node."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Trace all jobs of a folder, until the process is ended."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    folder, processes = Path(given[0]), int(given[1])
    os.nice(NICENESS)
    importlib.import_module("distexp.plan.tracing")
    running: dict[Any, tuple[BaseProcess, Config, Path]] = {}
    deadlines: dict[Any, float] = {}
    for number in itertools.count():
        while len(running) >= processes or not job_path(folder, number).exists():
            if not running:
                time.sleep(POLL_S)
            for sentinel in wait(list(running), POLL_S) if running else ():
                _finish(*running.pop(sentinel))
            for sentinel in [each for each in running if time.monotonic() > deadlines[each]]:
                _stop(*running.pop(sentinel))
        path = result_path(folder, number)
        config = typed_config(read_json(job_path(folder, number)))
        preload(config)
        process = get_context("fork").Process(target=_trace, args=(config, path))
        process.start()
        running[process.sentinel] = process, config, path
        limit = math.inf if config.plan.timeout_s is None else config.plan.timeout_s
        deadlines[process.sentinel] = time.monotonic() + limit
    raise AssertionError("unreachable")


def _trace(config: Config, path: Path) -> None:
    """Trace one configuration and write the result."""
    die_with_parent()
    try:
        write_json(path, {"estimate": make_estimate(config).to_json()})
    except ConfigError as error:
        write_json(path, {"error": str(error)})
    except Exception as error:
        traceback.print_exc()
        write_json(path, {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"})


def _estimate_states(config: Config, path: Path, reason: str) -> None:
    """Write the estimate by arithmetic."""
    die_with_parent()
    write_json(path, {"estimate": arithmetic_estimate(config, reason, count_parameters(config)).to_json()})


def _finish(process: BaseProcess, config: Config, path: Path) -> None:
    """Write the result of a process that died without one: the estimate by arithmetic."""
    process.join()
    if not path.exists():
        _fall_back(config, path, f"the process that traced it ended by {describe_exit(process.exitcode or 0)}")


def _stop(process: BaseProcess, config: Config, path: Path) -> None:
    """End a process that traces for too long, and write the estimate by arithmetic."""
    process.kill()
    process.join()
    if not path.exists():
        limit = f"plan.timeout_s={config.plan.timeout_s:g}"
        _fall_back(config, path, f"it took longer than {limit}: set a larger one, or plan.timeout_s=null for no limit")


def _fall_back(config: Config, path: Path, reason: str) -> None:
    """Write the estimate by arithmetic, in a process because it may fail as the trace did."""
    fallback = get_context("fork").Process(target=_estimate_states, args=(config, path, reason))
    fallback.start()
    fallback.join()
    if not path.exists():
        write_json(path, {"error": reason})


def describe_exit(code: int) -> str:
    """Return how a process ended, with the probable cause."""
    if code >= 0:
        return f"exit code {code}"
    causes: dict[int, str] = {
        signal.SIGKILL: ", possibly because this machine is out of memory",
        signal.SIGSEGV: ", possibly because a custom operator reads the memory of a tensor",
    }
    name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
    return name + causes.get(-code, "")


if __name__ == "__main__":
    sys.exit(main())

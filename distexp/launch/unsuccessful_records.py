"""Records of runs that did not complete, and of cells that cannot run: no worker has written them."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from distexp.launch.node import worker_environment
from distexp.runs import attempts
from distexp.runs.environment import make_environment
from distexp.runs.events import last_value, resume_changes
from distexp.runs.failure_text import join_errors
from distexp.runs.micro_batch import add_search
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import RunError, RunInfo
from distexp.runs.run_dir import allocator_paths, find_log
from distexp.runs.spec import RunSpec
from distexp.system.environment_variables import select_variables


def failed_record(spec: RunSpec, directory: Path, status: str, error: RunError, started: float | None) -> RunRecord:
    """Return the record of a run that did not complete, without memory traces.

    Args:
        spec: The run.
        directory: Directory of the run.
        status: Status of the run.
        error: Cause of the failure.
        started: Start of the run in Unix seconds; None if it never started, or not on this machine.
    """
    run, device = spec.run, spec.config.cluster.device
    if error.rank is not None and (log := find_log(directory, error.rank)) is not None:
        error.log = str(log)
    variables = {}
    if started is not None:
        run.started_at = datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds")
        run.duration_s = time.time() - started
        run.hosts = run.attempts[-1]["hosts"] if run.attempts else [socket.gethostname()]
        attempts.record_resume(run, last_value(directory, "resumed_from_step"), resume_changes(directory))
        variables = select_variables(worker_environment(spec, node=0))
    environment = make_environment(on_gpu=device == "cuda", variables=variables)
    record = RunRecord(status=status, run=run, config=asdict(spec.config), error=error, environment=environment)
    record.memory["torch"] = [json.loads(path.read_text()) for path in allocator_paths(directory)]
    add_search(record, directory)
    return record


def invalid_record(run: RunInfo, config: dict[str, Any], errors: list[str]) -> RunRecord:
    """Return the record of a cell whose combination of options is impossible."""
    return RunRecord(
        status="invalid",
        run=run,
        config=config,
        error=RunError("ConfigError", join_errors(errors), errors=errors),
        environment=make_environment(on_gpu=True),
    )

"""Start and end of a run's attempt: the files that it starts from, and the record that it ends with.

The process that outlives the run calls ``finalize_run``. That is the launcher, or the head's agent if the launcher
has died.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from distexp.checkpoints.folder import remove_unfinished
from distexp.launch.failures import classify_failure, current_phase
from distexp.launch.node import worker_environment
from distexp.launch.straggler_evidence import add_evidence
from distexp.measure.energy.cost import energy_entry
from distexp.measure.energy.trace_energy import TraceEnergy, measure_energy
from distexp.measure.memory.summary import run_traces, summarize_run
from distexp.runs import attempts
from distexp.runs.environment import make_environment
from distexp.runs.events import last_value, resume_changes
from distexp.runs.failure_text import join_errors
from distexp.runs.full_disk import name_folder, release_reserve
from distexp.runs.micro_batch import add_search
from distexp.runs.prediction import read_prediction
from distexp.runs.record import RunError, RunInfo, RunRecord
from distexp.runs.run_dir import DISK_RESERVE, EVENTS, PREFLIGHT, RESULT, allocator_paths, find_log
from distexp.runs.spec import RunSpec
from distexp.system.environment_variables import select_variables

DISK_RESERVE_BYTES = 256 * 1024
"""Size of a file that is kept during a run, so that the record can be written even if the disk is full."""


def start_attempt(spec: RunSpec, directory: Path, job_id: str | None = None, hosts: Sequence[str] = ()) -> None:
    """Register an attempt, write the spec for its workers, and reserve disk space for the record."""
    attempts.register_attempt(spec.run, directory, job_id, list(hosts) or [socket.gethostname()])
    spec.write(directory)
    with name_folder(directory):
        (directory / DISK_RESERVE).write_bytes(b"\0" * DISK_RESERVE_BYTES)


def finalize_run(
    spec: RunSpec,
    directory: Path,
    codes: Mapping[int, int],
    started: float,
    stopped: str | None = None,
    *,
    stopped_status: str = "killed",
) -> RunRecord:
    """Write the record of a run and return it.

    Args:
        spec: The run.
        directory: Directory of the run.
        codes: Exit code of each node's agent.
        started: Start of the run, in Unix seconds.
        stopped: Why the run was stopped from outside, if it was.
        stopped_status: Status of a run that was stopped.
    """
    release_reserve(directory)
    with suppress(OSError):  # Nothing needs the rest of a checkpoint, but it may fill the disk.
        remove_unfinished(directory)
    result = read_result(directory) if all(code == 0 for code in codes.values()) else None
    if result is not None:
        record = result
    elif stopped is not None:
        error = RunError("Stopped", stopped, current_phase(directory))
        record = failed_record(spec, directory, stopped_status, error, started)
    else:
        status, error = classify_failure(directory, codes, spec)
        record = failed_record(spec, directory, status, error, started)
        _advise(status, error, spec, directory)
    try:
        add_traces(record, spec, directory)
    except (OSError, ValueError) as error:  # The record of a finished training matters more than its memory.
        print(f"distexp: {directory} has no memory or energy in its record: {error}", file=sys.stderr)
    record.predicted = read_prediction(directory)
    attempts.finalize(record)
    record.write(directory)
    return record


def _advise(status: str, error: RunError, spec: RunSpec, directory: Path) -> None:
    """Add what would have fit to the error of a run that was out of GPU memory."""
    if status != "oom_gpu" or error.memory is None:
        return
    from distexp.launch.oom_advice import add_advice  # It needs the planner.

    try:
        add_advice(error.memory, spec, directory)
    except Exception as failure:  # The record matters more than the advice.
        print(f"distexp: {directory} has no advice in its record: {failure}", file=sys.stderr)


def read_result(directory: Path) -> RunRecord | None:
    """Read rank 0's part of the record; None if rank 0 did not write it."""
    try:
        return RunRecord.read(directory / RESULT)
    except ValueError:
        return None


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


def add_traces(record: RunRecord, spec: RunSpec, directory: Path) -> None:
    """Add the preflight's results, and what the memory traces contain, to a record."""
    if (directory / PREFLIGHT).exists():
        record.preflight = json.loads((directory / PREFLIGHT).read_text())
    if spec.config.measure.enabled:
        summary = summarize_run(directory, spec.nodes)
        record.memory.update(summary.memory)
        record.utilization.update(summary.utilization)
    add_energy(record, spec, directory)
    add_evidence(record, spec, directory)


def add_energy(record: RunRecord, spec: RunSpec, directory: Path) -> None:
    """Add energy and cost to a record. Without measurement only the GPU-hours and their price are known."""
    traces = run_traces(directory, spec.nodes)
    energy = measure_energy(traces, directory / EVENTS) if spec.config.measure.enabled else TraceEnergy()
    samples = last_value(directory, "measured_samples")
    tokens = last_value(directory, "measured_tokens")
    record.metrics.energy = energy_entry(
        energy, spec.config.cluster, duration_s=record.run.duration_s, samples=samples, tokens=tokens
    )
    if energy.gpu_training is not None and samples:
        record.metrics.energy_j_per_sample = energy.gpu_training / samples

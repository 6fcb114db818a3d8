"""Start and end of a run's attempt: the files that it starts from, and the record that it ends with.

The process that outlives the run calls ``finalize_run``. That is the launcher, or the head's agent if the launcher
has died.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from distexp.checkpoints.folder import remove_unfinished
from distexp.launch.failures import Cause, classify_failure, current_phase
from distexp.launch.record_measurements import add_explanation, add_strategy, add_traces
from distexp.launch.unsuccessful_records import failed_record
from distexp.runs import attempts
from distexp.runs.full_disk import name_folder, release_reserve
from distexp.runs.prediction import read_prediction
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import RunError
from distexp.runs.run_dir import DISK_RESERVE, RESULT
from distexp.runs.spec import RunSpec

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
    record = _completed_record(directory, codes)
    if record is None and stopped is not None:
        error = RunError("Stopped", stopped, current_phase(directory))
        record = failed_record(spec, directory, stopped_status, error, started)
    elif record is None:
        record = _classified_record(spec, directory, codes, started)
    try:
        add_traces(record, spec, directory)
    except (OSError, ValueError) as failure:  # The record of a finished training matters more than its memory.
        print(f"distexp: {directory} has no memory or energy in its record: {failure}", file=sys.stderr)
    add_strategy(record, spec)
    add_explanation(record, spec)
    record.predicted = read_prediction(directory)
    attempts.finalize(record)
    record.write(directory)
    return record


def _completed_record(directory: Path, codes: Mapping[int, int]) -> RunRecord | None:
    """Return what rank 0 wrote, if all agents succeeded."""
    return read_result(directory) if all(code == 0 for code in codes.values()) else None


def _classified_record(spec: RunSpec, directory: Path, codes: Mapping[int, int], started: float) -> RunRecord:
    """Return the record of a run that failed, with the cause, and with advice if it was out of GPU memory."""
    cause = classify_failure(directory, codes, spec)
    record = failed_record(spec, directory, cause.status, cause.error, started)
    _add_advice(cause, spec, directory)
    return record


def _add_advice(cause: Cause, spec: RunSpec, directory: Path) -> None:
    """Add what would have fit to the error of a run that was out of GPU memory."""
    if cause.status != "oom_gpu" or cause.error.memory is None:
        return
    from distexp.launch.oom_advice import add_advice  # It needs the planner.

    try:
        add_advice(cause.error.memory, spec, directory)
    except Exception as failure:  # The record matters more than the advice.
        print(f"distexp: {directory} has no advice in its record: {failure}", file=sys.stderr)


def read_result(directory: Path) -> RunRecord | None:
    """Read rank 0's part of the record; None if rank 0 did not write it."""
    try:
        return RunRecord.read(directory / RESULT)
    except ValueError:
        return None

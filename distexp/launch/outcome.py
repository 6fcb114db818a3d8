"""Start and end of a run's attempt: the files that it starts from, and the record that it ends with.

The process that outlives the run calls ``finalize_run``. That is the launcher, or the head's agent if the launcher
has died.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from distexp.checkpoints.folder import remove_unfinished
from distexp.launch.failures import classify_failure, current_phase
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
    """Classify how a run ended, write its record and return it.

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
        cause = classify_failure(directory, codes, spec)
        record = failed_record(spec, directory, cause.status, cause.error, started)
    complete(record, spec, directory)
    attempts.finalize(record)
    record.write(directory)
    return record


def complete(record: RunRecord, spec: RunSpec, directory: Path) -> None:
    """Add to a record what each step knows. A step that fails prints why: the record matters more."""
    for step in STEPS:
        try:
            step.add(record, spec, directory)
        except Exception as failure:
            reason = f"{type(failure).__name__}: {failure}"
            print(f"distexp: {step.failed.format(directory=directory)}: {reason}", file=sys.stderr)


class Step(NamedTuple):
    """A step between the classification of a run and the writing of its record.

    Attributes:
        failed: What is missing if it fails, for a message.
        add: Adds something to a record.
    """

    failed: str
    add: Callable[[RunRecord, RunSpec, Path], None]


def add_advice(record: RunRecord, spec: RunSpec, directory: Path) -> None:
    """Add what would have fit, if the run was out of GPU memory."""
    if record.status != "oom_gpu" or record.error is None or record.error.memory is None:
        return
    from distexp.launch import oom_advice  # It needs the planner.

    oom_advice.add_advice(record.error.memory, spec, directory)


def add_prediction(record: RunRecord, spec: RunSpec, directory: Path) -> None:
    """Add the memory that was predicted before the start."""
    record.predicted = read_prediction(directory)


STEPS = (
    Step("{directory} has no advice in its record", add_advice),
    Step("{directory} has no memory or energy in its record", add_traces),
    Step("the record has no strategy section", add_strategy),
    Step("the profiled step has no explanation", add_explanation),  # Its advice depends on the measured memory.
    Step("{directory} has no prediction in its record", add_prediction),
)
"""What completes a record, in this order."""


def _completed_record(directory: Path, codes: Mapping[int, int]) -> RunRecord | None:
    """Return what rank 0 wrote, if all agents succeeded."""
    return read_result(directory) if all(code == 0 for code in codes.values()) else None


def read_result(directory: Path) -> RunRecord | None:
    """Read rank 0's part of the record; None if rank 0 did not write it."""
    try:
        return RunRecord.read(directory / RESULT)
    except ValueError:
        return None

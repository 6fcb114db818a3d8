"""Attempts of a run. All work in the same run directory, and the record lists them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from distexp.runs.events import last_value
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import RunInfo
from distexp.runs.run_dir import ARCHIVED_RECORD, ATTEMPT_FILES, ATTEMPTS, HEARTBEAT, OWNER, RECORD, SPEC, STOP_REQUEST
from distexp.runs.typed_values import read_dataclass

Attempt = dict[str, Any]
"""An entry of ``run.attempts`` in a record. ``new_attempt`` makes one with all its keys."""

NO_RECORD = "ended without a record"
"""Reason of an attempt whose launcher died before it could write the record, as when the head node crashes."""


def archive_previous(directory: Path) -> None:
    """Move the files of the previous attempt to ``attempts/<k>/``, if there are any."""
    archived_names = {name: name for name in ATTEMPT_FILES} | {RECORD: ARCHIVED_RECORD}
    found = [name for name in archived_names if (directory / name).exists()]
    if not found:
        return
    archive = directory / ATTEMPTS
    archive.mkdir(exist_ok=True)
    number = len(list(archive.iterdir()))
    folder = archive / str(number)
    folder.mkdir()
    for name in found:
        (directory / name).rename(folder / archived_names[name])


def read_attempts(directory: Path) -> list[Attempt]:
    """Read the attempts so far from the record, or from the spec if there is no record."""
    try:
        return RunRecord.read(directory / RECORD).run.attempts
    except ValueError:
        pass
    run = read_dataclass(RunInfo, directory / SPEC, "run")
    return [] if run is None else run.attempts


def earlier_records(directory: Path) -> list[RunRecord]:
    """Return the records of all attempts but the latest. One that wrote none, or a damaged one, is absent."""
    found = []
    for path in sorted((directory / ATTEMPTS).glob(f"*/{ARCHIVED_RECORD}")):
        with suppress(ValueError):
            found.append(RunRecord.read(path))
    return found


def register_attempt(run: RunInfo, directory: Path, job_id: str | None, hosts: list[str]) -> None:
    """Add a new attempt to those of a run, and archive the files of the previous one.

    Args:
        run: The run. Its attempts are replaced.
        directory: Directory of the run.
        job_id: Slurm job of the attempt, or None.
        hosts: Names of its nodes.
    """
    attempts = read_attempts(directory)
    if attempts and attempts[-1].get("reason") is None:
        attempts[-1] |= {"reason": NO_RECORD, "resumed_from_step": last_value(directory, "resumed_from_step")}
    archive_previous(directory)
    run.attempts = [*attempts, new_attempt(job_id, hosts)]


def register_manual_attempt(run: RunInfo, directory: Path) -> None:
    """Add an attempt that was started by hand with torchrun, and drop a stop request for an earlier one.

    The spec lists the attempt that it was written for. If that attempt trained in this directory, it has ended without
    a record. If not, the directory is a copy, and the attempt is not one of this directory.
    """
    for name in (STOP_REQUEST, OWNER):  # of an earlier attempt
        (directory / name).unlink(missing_ok=True)
    run.attempts = read_attempts(directory)
    if run.attempts and run.attempts[-1].get("reason") is None:
        if (directory / HEARTBEAT).exists():
            run.attempts[-1]["reason"] = NO_RECORD
        else:
            run.attempts.pop()
    run.attempts.append(new_attempt(None, []))


def new_attempt(job_id: str | None, hosts: list[str]) -> Attempt:
    """Return an attempt that has not ended."""
    return {"job_id": job_id, "hosts": hosts, "resumed_from_step": None, "changes": [], "reason": None}


def record_resume(run: RunInfo, step: int | None, changes: list[str]) -> None:
    """Record how the latest attempt resumed.

    Args:
        run: The run.
        step: Step of the checkpoint; None if the attempt started fresh.
        changes: Settings that differ from those of the checkpoint.
    """
    if run.attempts:
        run.attempts[-1] |= {"resumed_from_step": step, "changes": changes}


def finalize(record: RunRecord) -> None:
    """Record the hosts of the latest attempt, and the status of the run as its reason."""
    if record.run.attempts:
        record.run.attempts[-1] |= {"hosts": record.run.hosts, "reason": record.status}

"""The attempts of one run: a later one works in the same directory, and the record lists them all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from distexp.runs import stop_request
from distexp.runs.events import last_value
from distexp.runs.record import RECORD, SPEC, RunInfo, RunRecord

FOLDER = "attempts"
"""``attempts/<k>/`` holds what attempt k left; the run directory itself is the latest attempt's."""

ARCHIVED_RECORD = "earlier_record.json"
"""A record that a later attempt replaces, under a name that no reader of records takes for one."""

NO_RECORD = "ended without a record"
"""How an attempt ended that nobody outlived, as when the head's node crashed."""

ATTEMPT_FILES = (
    *("logs", "memory", "model", "metrics.jsonl", "events.jsonl", "predictions.json", "preflight.json"),
    *("heartbeat", "rendezvous.json", "notice.json", "oom_kills.json"),
)


def archive_previous(directory: Path) -> None:
    """Moves what an earlier attempt left out of the way of the next; nothing to do in a fresh directory."""
    left = {name: name for name in ATTEMPT_FILES} | {RECORD: ARCHIVED_RECORD}
    there = [name for name in left if (directory / name).exists()]
    if not there:
        return
    folder = directory / FOLDER
    folder.mkdir(exist_ok=True)
    folder /= str(len(list(folder.iterdir())))
    folder.mkdir()
    for name in there:
        (directory / name).rename(folder / left[name])


def read_attempts(directory: Path) -> list[dict[str, Any]]:
    """The attempts so far, from the record or, where an attempt left none, from the spec."""
    try:
        return RunRecord.read(directory / RECORD).run.attempts
    except ValueError:
        pass
    try:
        attempts: list[dict[str, Any]] = json.loads((directory / SPEC).read_text())["run"]["attempts"]
    except (OSError, ValueError, KeyError):
        return []
    return attempts


def register_attempt(run: RunInfo, directory: Path, job_id: str | None, hosts: list[str]) -> None:
    """Lists a new attempt after the earlier ones, whose files are set aside."""
    attempts = read_attempts(directory)
    if attempts and attempts[-1]["reason"] is None:
        attempts[-1] |= {"reason": NO_RECORD, "resumed_from_step": last_value(directory, "resumed_from_step")}
    archive_previous(directory)
    run.attempts = [*attempts, {"job_id": job_id, "hosts": hosts, "resumed_from_step": None, "reason": None}]


def register_manual_attempt(run: RunInfo, directory: Path) -> bool:
    """Lists an attempt that torchrun began, and says whether it is one.

    An attempt that a launcher began is listed already, and has no record yet. One that torchrun began has no agent
    that could have been told of an end, so word of one is left over.
    """
    if run.attempts and not (directory / RECORD).exists():
        return False
    (directory / stop_request.FILE).unlink(missing_ok=True)
    own: dict[str, Any] = {"job_id": None, "hosts": [], "resumed_from_step": None, "reason": None}
    run.attempts = [*read_attempts(directory), own]
    return True


def record_resume_step(run: RunInfo, step: int | None) -> None:
    """Says of the latest attempt which step's checkpoint it went on from; None where it began anew."""
    if run.attempts:
        run.attempts[-1]["resumed_from_step"] = step


def finalize(record: RunRecord) -> None:
    """Says of the latest attempt how it ended: ``reason`` is the status that the record then had."""
    if record.run.attempts:
        record.run.attempts[-1]["hosts"] = record.run.hosts
        record.run.attempts[-1]["reason"] = record.status


def is_final(record: RunRecord) -> bool:
    """Whether the latest attempt's outcome is settled; always so for a record that lists none."""
    return not record.run.attempts or record.run.attempts[-1]["reason"] is not None

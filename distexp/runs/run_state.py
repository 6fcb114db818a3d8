"""State of a run at one moment, for tables and for following a sweep."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from distexp.runs.failure_text import failure_text
from distexp.runs.record import RunRecord

ACTIVE = ("pending", "running", "ending", "unknown")
"""States of a run that may not have ended yet."""


@dataclass(frozen=True)
class RunState:
    """State of one run.

    Attributes:
        number: The run's number in its sweep.
        directory: The run directory.
        job: The Slurm job as ARRAY_INDEX; None for a run that is not on Slurm.
        state: One of ACTIVE, "no record", or the status of the record.
        reason: Why the run is waiting, or why it did not complete.
        nodes: Slurm's list of the job's nodes.
        record: The record of a run that has ended.
    """

    number: int
    directory: Path
    job: str | None
    state: str
    reason: str = ""
    nodes: str = ""
    record: RunRecord | None = None

    @classmethod
    def from_record(cls, number: int, directory: Path, job: str | None, record: RunRecord) -> RunState:
        """Return the state of a run that has ended."""
        reason = " ".join(failure_text(record).split())
        return cls(number, directory, job, record.status, reason, record=record)

    @property
    def is_active(self) -> bool:
        """Whether the run may not have ended yet."""
        return self.state in ACTIVE

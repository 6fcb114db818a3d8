"""Files between the planner and the process that traces."""

from __future__ import annotations

from pathlib import Path

POLL_S = 0.05
LOG = "log.txt"


def job_path(folder: Path, number: int) -> Path:
    """Return the file with the configuration of a job."""
    return folder / f"job{number}.json"


def result_path(folder: Path, number: int) -> Path:
    """Return the file with the result of a job."""
    return folder / f"result{number}.json"

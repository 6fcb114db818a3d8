"""Error files of a run, which ranks and agents write before they end."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

from distexp.runs.json_files import read_json, write_json
from distexp.runs.record_sections import RunError
from distexp.runs.run_dir import error_paths

ERROR_HEADING = "this rank ends with an error:"
"""Line of a rank's log before the error that ends the rank."""

SUBMISSION_REFUSED = "SubmissionRefused"
"""Type of the error of a run whose job Slurm has refused."""


def write_error(path: Path, error: RunError) -> None:
    """Write an error with the current time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"unix_time_s": time.time(), **asdict(error)})


def read_rank_errors(run_dir: Path) -> list[RunError]:
    """Read the errors of all ranks and agents in the order of time."""
    by_time: list[tuple[float, RunError]] = []
    for path in error_paths(run_dir):
        try:
            content = read_json(path)
        except ValueError:
            continue  # Torn, because its rank was killed. The rank's log has more.
        unix_time_s = float(content.pop("unix_time_s"))
        by_time.append((unix_time_s, RunError(**content)))
    by_time.sort(key=lambda timed: timed[0])
    return [error for _, error in by_time]

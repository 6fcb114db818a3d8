"""``step_times/rank<k>.csv``: durations of a rank's ordinary steps, and whether each was watched for slow ranks."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from distexp.runs.files import replace_atomically
from distexp.runs.run_dir import step_times_path

COLUMNS = ("step", "microseconds", "watched")


@dataclass(frozen=True)
class StepTime:
    """Duration of an ordinary step.

    Attributes:
        step: Number among the measured steps, from 0.
        seconds: Duration.
        watched: Whether the rank measured in this step how long it waits for other ranks.
    """

    step: int
    seconds: float
    watched: bool


def write_step_times(run_dir: Path, rank: int, steps: Iterable[StepTime]) -> None:
    """Write the file of a rank."""
    path = step_times_path(run_dir, rank)
    path.parent.mkdir(exist_ok=True)
    with replace_atomically(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows((step.step, round(1e6 * step.seconds), int(step.watched)) for step in steps)


def read_step_times(run_dir: Path, rank: int) -> list[StepTime]:
    """Read the file of a rank.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it has another format.
    """
    path = step_times_path(run_dir, rank)
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    if tuple(header) != COLUMNS:
        raise ValueError(f"{path} has the columns {header}, and not {list(COLUMNS)}")
    return [StepTime(int(step), int(duration) / 1e6, watched == "1") for step, duration, watched in rows]

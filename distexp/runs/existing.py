"""What a sweep that is resumed has already: which of its cells are done, and where the others are."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distexp.runs.record import RECORD, SPEC

COMMAND = "command.json"
"""The words of the command that began a sweep."""

DONE = frozenset({"completed", "oom_gpu", "oom_host"})
"""Running out of memory is a result: the same run would do it again."""

NON_RUN_DIRS = ("snapshot", "slurm", "logs", "memory", "attempts", "report", ".")
"""How folders begin that hold no run directory."""


@dataclass(frozen=True)
class ExistingRun:
    """A run that the sweep has, with the status of its record; None where it left none."""

    number: int
    directory: Path
    id: str
    overrides: list[str]
    status: str | None


@dataclass
class ExistingRuns:
    """The runs of a sweep, less those that a cell has been given."""

    runs: list[ExistingRun] = field(default_factory=list)

    @classmethod
    def read(cls, sweep_dir: Path) -> ExistingRuns:
        """Reads every run directory below a sweep's."""
        return cls(sorted(_runs(sweep_dir), key=lambda run: run.number))

    def match(self, cells: Sequence[tuple[str, list[str]]]) -> list[ExistingRun | None]:
        """The run of each cell, given as its ``run.id`` and overrides; each run is taken once.

        It is the one with both; else with that id, for the same training may be asked for in other words; else one
        that was invalid with these overrides. Cells that are the same training, as under
        ``cluster.cpus_per_worker=1,2``, so keep their own runs.
        """
        found: list[ExistingRun | None] = [None] * len(cells)
        for fits in (_is_same, _is_same_training, _was_invalid):
            for position, (identity, overrides) in enumerate(cells):
                if found[position] is None:
                    found[position] = next((run for run in self.runs if fits(run, identity, overrides)), None)
                    self.runs = [run for run in self.runs if run is not found[position]]
        return found

    def unfinished(self, below: Path) -> list[ExistingRun]:
        """What nothing has taken and would go on; without the run that has the sweep's directory for its own."""
        over = {*DONE, "invalid"}
        return [run for run in self.runs if run.status not in over and run.directory != below.absolute()]


def _is_same(run: ExistingRun, identity: str, overrides: list[str]) -> bool:
    return run.id == identity and run.overrides == overrides


def _is_same_training(run: ExistingRun, identity: str, overrides: list[str]) -> bool:
    return run.id == identity != "invalid"


def _was_invalid(run: ExistingRun, identity: str, overrides: list[str]) -> bool:
    return run.id == "invalid" and run.overrides == overrides


def unmatched_message(runs: Sequence[ExistingRun]) -> str | None:
    """``run 0 (killed) stays as it is: ...``, for who resumes with other values; None where there is no such run."""
    if not runs:
        return None
    shown = ", ".join(f"{run.number} ({run.status or 'without a record'})" for run in runs)
    if len(runs) == 1:
        return f"run {shown} stays as it is: what is asked for now is another run; with its own values it goes on"
    return f"runs {shown} stay as they are: what is asked for now are other runs; with their own values they go on"


def _runs(sweep_dir: Path) -> Iterator[ExistingRun]:
    for where, folders, names in os.walk(sweep_dir):
        folders[:] = [name for name in folders if not name.startswith(NON_RUN_DIRS)]
        directory = Path(where)
        if RECORD in names or SPEC in names:
            raw = _read(directory / RECORD) or _read(directory / SPEC)
            if raw is not None:
                run = raw["run"]
                yield ExistingRun(run["number"], directory.absolute(), run["id"], run["overrides"], raw.get("status"))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return raw if isinstance(raw.get("run"), dict) else None


def not_a_sweep(directory: Path, lacks: str) -> str:
    """Why a directory is no sweep, and what to give instead: the sweep above it, where it is one of its runs."""
    if not directory.is_dir():
        return f"{directory} {'is a file' if directory.exists() else 'does not exist'}: give the directory of a sweep"
    for above in directory.absolute().parents:
        if (above / COMMAND).is_file():
            return f"{directory} is not a sweep but lies in one: give {above}"
    return f"{directory} holds no {lacks}: give the directory of a sweep"

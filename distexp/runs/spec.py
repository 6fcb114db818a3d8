"""Specification of a run: ``spec.json``, which the launcher writes and the workers read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distexp.config import Config
from distexp.runs.record import INVALID_ID, STATUSES
from distexp.runs.record_sections import RunInfo
from distexp.runs.run_dir import NON_RUN_DIRS, RECORD, SPEC
from distexp.system.files import open_file, read_json, write_json
from distexp.system.typed_values import parse_dataclass


@dataclass(frozen=True)
class RunSpec:
    """The resolved configuration of a run, and its identity."""

    config: Config
    run: RunInfo

    @property
    def nodes(self) -> int:
        """Number of nodes, including simulated ones."""
        return self.config.cluster.nodes

    @property
    def workers_per_node(self) -> int:
        """Number of workers on each node, one per GPU."""
        workers = self.config.cluster.workers_per_node
        assert workers is not None, "resolve() decides the number of workers"
        return workers

    @property
    def world_size(self) -> int:
        """Number of workers on all nodes."""
        return self.config.cluster.world_size

    def write(self, directory: Path) -> None:
        """Write ``directory/spec.json`` atomically."""
        write_json(directory / SPEC, {"config": asdict(self.config), "run": asdict(self.run)})

    @classmethod
    def read(cls, directory: Path) -> RunSpec:
        """Read the ``spec.json`` of a run directory, or raise OSError, or ValueError if it is damaged."""
        try:
            with open_file(directory / SPEC) as file:
                raw = json.load(file)
            return cls(config=parse_config(raw["config"]), run=parse_dataclass(RunInfo, raw["run"]))
        except (KeyError, TypeError, ValueError, OmegaConfBaseException) as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise ValueError(f"{directory / SPEC} is damaged ({reason})") from error


def parse_config(values: Any) -> Config:
    """Return a configuration as dataclasses. Raise OmegaConfBaseException if it does not match the schema."""
    return cast(Config, OmegaConf.to_object(OmegaConf.merge(_schema(), values)))


@lru_cache(maxsize=1)
def _schema() -> DictConfig:
    """Return the schema. It is cached, because making it takes as long as composing a cell."""
    return cast(DictConfig, OmegaConf.structured(Config))


DONE = frozenset({"completed", "oom_gpu", "oom_host"})
"""Statuses of runs that are not run again. Running out of memory is a result: the same run would do it again."""


@dataclass(frozen=True)
class ExistingRun:
    """A run on disk, with the status of its record; None if it has no record."""

    number: int
    directory: Path
    id: str
    overrides: list[str]
    status: str | None


@dataclass
class ExistingRuns:
    """Runs of a sweep that no cell has been matched with."""

    runs: list[ExistingRun] = field(default_factory=list)

    @classmethod
    def read(cls, sweep_dir: Path) -> ExistingRuns:
        """Read every run directory below a sweep directory."""
        return cls(sorted(_read_runs(sweep_dir), key=lambda run: run.number))

    def match(self, cells: Sequence[RunInfo]) -> list[ExistingRun | None]:
        """Return the run of each cell, or None. Each run is matched once, and then removed from ``runs``.

        The first of these that matches is taken:

        1. same id and same overrides;
        2. same id, because other overrides may describe the same training;
        3. same overrides, if the run was invalid.

        Cells with the same id keep their own runs, for example ``cluster.cpus_per_worker=1,2``.

        Only the id and the overrides of a cell count.
        """
        found: list[ExistingRun | None] = [None] * len(cells)
        rules: tuple[Callable[[ExistingRun, RunInfo], bool], ...] = (
            lambda run, cell: run.id == cell.id and run.overrides == cell.overrides,
            lambda run, cell: run.id == cell.id != INVALID_ID,
            lambda run, cell: run.id == INVALID_ID and run.overrides == cell.overrides,
        )
        for is_match in rules:
            for position, cell in enumerate(cells):
                if found[position] is None:
                    found[position] = next((run for run in self.runs if is_match(run, cell)), None)
                    self.runs = [run for run in self.runs if run is not found[position]]
        return found

    def unfinished(self, below: Path) -> list[ExistingRun]:
        """Return the unmatched runs that could be resumed, without one in the sweep directory ``below`` itself."""
        ended = {*DONE, "invalid"}
        return [run for run in self.runs if run.status not in ended and run.directory != below.absolute()]


def unmatched_message(runs: Sequence[ExistingRun]) -> str | None:
    """Return the warning about unfinished runs that no cell matches; None if there are none."""
    damaged = [run for run in runs if not run.id]
    runs = [run for run in runs if run.id]
    texts = [
        f"{run.directory} was not resumed, because neither its {RECORD} nor its {SPEC} can be read" for run in damaged
    ]
    return ". ".join([*texts, *_unmatched(runs)]) or None


def _unmatched(runs: Sequence[ExistingRun]) -> Iterator[str]:
    if not runs:
        return
    shown = ", ".join(f"{run.number} ({run.status or 'no record'})" for run in runs)
    if len(runs) == 1:
        yield (
            f"run {shown} was not resumed: the new overrides define a different run. "
            "Resume without them to continue it."
        )
        return
    yield (
        f"runs {shown} were not resumed: the new overrides define different runs. Resume without them to continue them."
    )


def _read_runs(sweep_dir: Path) -> Iterator[ExistingRun]:
    """Yield the runs below a folder. One of which no file can be read has the number of its folder."""
    for folder, subfolders, files in os.walk(sweep_dir):
        # os.walk enters only the subfolders that are left in this list.
        subfolders[:] = [name for name in subfolders if not name.startswith(NON_RUN_DIRS)]
        if RECORD in files or SPEC in files:
            directory = Path(folder).absolute()
            run = _read_run(directory / RECORD) or _read_run(directory / SPEC)
            if run is None and directory.name.isdecimal():
                run = ExistingRun(int(directory.name), directory, id="", overrides=[], status=None)
            if run is not None:
                yield run


def _read_run(path: Path) -> ExistingRun | None:
    """Return the run of a record or a spec; None if the file is missing or damaged."""
    try:
        raw = read_json(path)
        run, status = parse_dataclass(RunInfo, raw["run"]), raw.get("status")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return ExistingRun(run.number, path.parent, run.id, run.overrides, status if status in STATUSES else None)

"""Preparation of runs for a queue: each gets its directory with the files that its job reads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from distexp.console.invalid_cells import InvalidCells
from distexp.console.plain_text import print_plain
from distexp.console.progress import show_progress
from distexp.launch.assigned_runs import AssignedRun, ExistingRunRules, assign_run_dirs, write_invalid
from distexp.launch.cell import Cell
from distexp.launch.git_state import GitState
from distexp.runs import attempts
from distexp.runs.existing import DONE, ExistingRun
from distexp.runs.failure_text import failure_text, join_errors
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import HYDRA
from distexp.runs.spec import RunSpec


@dataclass(frozen=True)
class PreparedRun:
    """A run with its directory, ready to be submitted."""

    spec: RunSpec
    directory: Path


def prepare_runs(
    cells: Sequence[Cell],
    sweep_dir: Path,
    code: GitState,
    console: Console,
    *,
    active: Collection[int],
    resume: bool,
    snapshot: str | None = None,
) -> Iterator[PreparedRun]:
    """Give each cell its directory, and write the spec of its run.

    An invalid cell gets its record instead.

    Args:
        cells: All cells of the sweep.
        sweep_dir: Directory of the sweep.
        code: Git state of the code.
        console: Where to report runs that are skipped or invalid.
        active: Numbers of the runs that are in the queue, or run.
        resume: Whether the directory may hold runs of an earlier command.
        snapshot: Copy of the code that the runs use, relative to the directory of the sweep.
    """

    def should_skip(run: ExistingRun) -> bool:
        skipped = run.number in active or run.status in DONE
        if skipped:
            print_plain(console, f"run {run.number}: already {'submitted' if run.number in active else run.status}")
        return skipped

    rules = ExistingRunRules(should_skip, warn=partial(print_plain, console), active=active)
    runs = assign_run_dirs(cells, sweep_dir, code, rules, resume=resume, snapshot=snapshot)
    invalid = InvalidPrinter(cells, console)
    with show_progress("preparing", len(cells)) as advance:
        for run in runs:
            prepared = prepare_run(run)
            advance()
            if isinstance(prepared, RunRecord):
                invalid.print(run.info.number, failure_text(prepared))
            else:
                yield prepared


def prepare_run(run: AssignedRun) -> PreparedRun | RunRecord:
    """Write the spec of a run and return what to submit; for an invalid run write its record and return that."""
    write_hydra_files(run.composed, run.directory)
    if run.cell.config is None:
        return write_invalid(run)
    run.info.attempts = attempts.read_attempts(run.directory)
    attempts.archive_previous(run.directory)
    spec = RunSpec(run.cell.config, run.info)
    spec.write(run.directory)
    run.cell.write_prediction(run.directory)
    return PreparedRun(spec, run.directory)


def write_hydra_files(composed: DictConfig, directory: Path) -> None:
    """Write ``.hydra/`` with the files that Hydra itself writes."""
    folder = directory / HYDRA
    folder.mkdir(parents=True, exist_ok=True)
    content = OmegaConf.to_container(composed, enum_to_str=True)
    assert isinstance(content, dict)
    hydra = content.pop("hydra")
    parts = {"overrides": hydra["overrides"]["task"], "hydra": {"hydra": hydra}, "config": content}
    for name, part in parts.items():
        # The same YAML as OmegaConf.save writes, ten times as fast: a sweep may have hundreds of runs.
        (folder / f"{name}.yaml").write_text(yaml.dump(part, Dumper=yaml.CSafeDumper, sort_keys=False))


class InvalidPrinter:
    """Printer of why cells are invalid: one line for all cells with the same reason."""

    def __init__(self, cells: Sequence[Cell], console: Console, prefix: str = "") -> None:
        """Collect the reasons.

        Args:
            cells: All cells of the sweep.
            console: Where to print.
            prefix: Start of each line.
        """
        self._reasons = InvalidCells(join_errors(cell.errors) for cell in cells if cell.config is None)
        self._console, self._prefix = console, prefix

    def print(self, number: int, reason: str) -> None:
        """Print why a run is invalid, unless the reason was printed before."""
        if label := self._reasons.label(number, reason):
            print_plain(self._console, f"{self._prefix}{label}: invalid: {reason}")

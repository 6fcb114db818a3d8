"""Output of ``cluster.dry_run=true``: the sbatch files of a sweep. Nothing is written or submitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from distexp.config import Config
from distexp.console.plain_text import print_plain
from distexp.launch.cell import Cell
from distexp.launch.prepare import InvalidPrinter
from distexp.launch.slurm.script import JobArray
from distexp.launch.slurm.submission import group_by_resources
from distexp.runs.command_text import format_override
from distexp.runs.failure_text import join_errors
from distexp.runs.listing import format_count, format_runs
from distexp.runs.run_dir import SNAPSHOT

MAX_LISTED_RUNS = 20
"""Runs of an array whose overrides are printed."""


@dataclass(frozen=True)
class PlannedRun:
    """A valid cell, with the number that its run would have in a new sweep."""

    number: int
    config: Config
    overrides: str  # as they are typed; of several cells only those that they do not share


def print_scripts(cells: Sequence[Cell], sweep_dir: Path, console: Console) -> None:
    """Print the sbatch files of a sweep."""
    runs = list(_plan_runs(cells, InvalidPrinter(cells, console, prefix="# ")))
    for index, group in enumerate(group_by_resources(runs, lambda run: run.config)):
        numbers = [run.number for run in group]
        directories = tuple(map(str, numbers))
        array = JobArray(f"array{index}", group[0].config, sweep_dir, sweep_dir / SNAPSHOT, directories)
        print_plain(console, f"# {format_runs(numbers)}")
        for run in group[:MAX_LISTED_RUNS]:
            print_plain(console, f"#   {run.number}: {run.overrides or 'no overrides'}")
        if len(group) > MAX_LISTED_RUNS:
            print_plain(console, f"#   and {len(group) - MAX_LISTED_RUNS} more")
        print_plain(console, array.render())
    jobs = format_count(len(runs), "job")
    print_plain(
        console, f"# {jobs}, nothing was submitted. The folder of the sweep and its files are made at submission."
    )


def _plan_runs(cells: Sequence[Cell], invalid: InvalidPrinter) -> list[PlannedRun]:
    """Return the runs of the valid cells, and print why the others are invalid."""
    runs = []
    for number, cell in enumerate(cells):
        if cell.config is None:
            invalid.print(number, join_errors(cell.errors))
        else:
            overrides = " ".join(map(format_override, cell.varied or cell.overrides))
            runs.append(PlannedRun(number, cell.config, overrides))
    return runs

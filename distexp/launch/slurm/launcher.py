"""Slurm launcher: compose a sweep, prepare the directories of its runs, submit and follow them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.types import HydraContext
from omegaconf import DictConfig
from rich.console import Console

from distexp.config import Config, ConfigError
from distexp.console.invalid_cells import InvalidCells
from distexp.console.progress import show_progress
from distexp.exceptions import SweepInterrupted
from distexp.launch.composition import Cell, cell_maker, compose_cells
from distexp.launch.plan_runs import plan_runs
from distexp.launch.slurm import client
from distexp.launch.slurm.follow import follow
from distexp.launch.slurm.prepare import prepare_run
from distexp.launch.slurm.script import JobArray
from distexp.launch.slurm.status import poll
from distexp.launch.slurm.submission import PreparedRun, group_by_resources, submit_runs
from distexp.launch.slurm.submitit_keys import apply_submitit_options
from distexp.launch.snapshot import Snapshot, take_snapshot
from distexp.launch.sweep import assign_run_dirs, locked_sweep_dir
from distexp.runs.command_text import suggest_command
from distexp.runs.existing import DONE, ExistingRun
from distexp.runs.failure_text import failure_text, join_errors
from distexp.runs.listing import format_runs
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import SNAPSHOT

NOT_CONFIGURED = "configuration source"
"""Part of the error message of Slurm's commands if Slurm is installed but not configured."""


def run_sweep(
    context: HydraContext, master: DictConfig, overrides: Sequence[Sequence[str]], given: Mapping[str, Any]
) -> list[JobReturn]:
    """Submit every cell, and follow the runs unless ``cluster.wait=false``.

    Args:
        context: Hydra's configuration loader and callbacks.
        master: Configuration of the command, with Hydra's node.
        overrides: The overrides of each cell.
        given: Options under ``hydra.launcher``.
    """
    adjust = partial(apply_submitit_options, given)
    cells = compose_cells(context, master, overrides, adjust)
    cluster = cells[0].composed.cluster
    # Predictions may take minutes, so what would stop the submission is checked before them.
    starts_nothing = cluster.dry_run or master.plan.only or (master.choose.only and master.choose.dry_run)
    max_size = 0 if starts_nothing else _check_slurm()
    if master.choose.only:
        from distexp.choose.command import run_choose
        from distexp.launch.slurm.choose import SlurmTrials

        trials = SlurmTrials(max_size, list(cells[0].composed.trusted_packages))
        run_choose(cells, master, cell_maker(context, master, adjust), trials)
        return []
    if plan_runs(cells, master, cell_maker(context, master, adjust)):
        return []
    console = Console()
    if cluster.dry_run:
        print_scripts(cells, Path(master.hydra.sweep.dir).absolute(), console)
        return []
    with locked_sweep_dir(master, len(cells)) as claimed:
        sweep_dir = claimed.absolute()
        try:
            snapshot = take_snapshot(sweep_dir, list(cells[0].composed.trusted_packages), partial(_print, console))
            prepared = list(prepare_runs(cells, sweep_dir, snapshot, console, resume=master.sweep.resume))
        except KeyboardInterrupt:
            hint = suggest_command("resume", sweep_dir)
            raise SweepInterrupted(f"interrupted: nothing was submitted; to submit the runs: {hint}") from None
        submit_runs(prepared, sweep_dir, snapshot.folder, max_size, console)
    _print(console, f"sweep: {sweep_dir}")
    if cluster.wait:
        follow(sweep_dir, console)
    else:
        _print(console, f"status: {suggest_command('status', sweep_dir)}")
    return []


def _print(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _check_slurm() -> int:
    """Return Slurm's MaxArraySize.

    Raises:
        ConfigError: If this machine has no configured Slurm.
        OSError: If Slurm does not answer.
    """
    if not client.has_sbatch():
        raise ConfigError(
            "cluster=slurm needs sbatch, which is not on this machine's PATH: log in to the cluster, or print the "
            "sbatch files with cluster.dry_run=true"
        )
    try:
        return client.max_array_size()
    except client.SlurmError as error:
        if NOT_CONFIGURED in str(error):
            raise ConfigError(
                f"cluster=slurm: Slurm is not configured on this machine ({error}): log in to a node of the cluster, "
                "or use cluster=local; distexp doctor shows details"
            ) from None
        raise OSError(f"Slurm does not answer ({error}); nothing was submitted: try again later") from None


def prepare_runs(
    cells: Sequence[Cell], sweep_dir: Path, snapshot: Snapshot, console: Console, *, resume: bool
) -> Iterator[PreparedRun]:
    """Give each cell its directory, and write the spec of its run.

    An invalid cell gets its record instead.

    Args:
        cells: All cells of the sweep.
        sweep_dir: Directory of the sweep.
        snapshot: Copy of the code that the runs use.
        console: Where to report runs that are skipped or invalid.
        resume: Whether the directory may hold runs of an earlier command.
    """
    active = {run.number for run in poll(sweep_dir) if run.is_active} if resume else set()

    def should_skip(run: ExistingRun) -> bool:
        skipped = run.number in active or run.status in DONE
        if skipped:
            _print(console, f"run {run.number}: already {'submitted' if run.number in active else run.status}")
        return skipped

    runs = assign_run_dirs(
        cells,
        sweep_dir,
        snapshot.git,
        resume=resume,
        should_skip=should_skip,
        warn=partial(_print, console),
        snapshot=snapshot.folder.name,
        active=active,
    )
    invalid = _invalid_cells(cells)
    with show_progress("preparing", len(cells)) as advance:
        for run in runs:
            prepared = prepare_run(run)
            advance()
            if isinstance(prepared, RunRecord):
                _print_invalid(console, invalid, run.info.number, failure_text(prepared))
            else:
                yield prepared


def _invalid_cells(cells: Sequence[Cell]) -> InvalidCells:
    return InvalidCells(join_errors(cell.errors) for cell in cells if cell.config is None)


def _print_invalid(console: Console, cells: InvalidCells, number: int, reason: str, prefix: str = "") -> None:
    """Print why a cell is invalid, once for all cells with the same reason."""
    if label := cells.label(number, reason):
        _print(console, f"{prefix}{label}: invalid: {reason}")


def print_scripts(cells: Sequence[Cell], sweep_dir: Path, console: Console) -> None:
    """Print the sbatch files of a sweep without writing or submitting anything."""
    valid: list[tuple[int, Config]] = []
    invalid = _invalid_cells(cells)
    for number, cell in enumerate(cells):
        if cell.config is None:
            _print_invalid(console, invalid, number, join_errors(cell.errors), prefix="# ")
        else:
            valid.append((number, cell.config))
    for index, members in enumerate(group_by_resources(valid, lambda member: member[1])):
        numbers = [number for number, _ in members]
        directories = tuple(map(str, numbers))
        array = JobArray(f"array{index}", members[0][1], sweep_dir, sweep_dir / SNAPSHOT, directories)
        _print(console, f"# {format_runs(numbers)}")
        _print(console, array.render())

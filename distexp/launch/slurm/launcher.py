"""Slurm launcher: compose a sweep, prepare the directories of its runs, submit and follow them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.types import HydraContext
from omegaconf import DictConfig
from rich.console import Console

from distexp.config import ConfigError
from distexp.console.plain_text import print_plain
from distexp.exceptions import SweepInterrupted
from distexp.launch.cell import Cell, MakeCell
from distexp.launch.composition import cell_maker, compose_cells
from distexp.launch.plan_runs import plan_runs
from distexp.launch.slurm import client
from distexp.launch.slurm.dry_run import print_scripts
from distexp.launch.slurm.follow import follow
from distexp.launch.slurm.prepare import prepare_runs
from distexp.launch.slurm.submission import submit_runs
from distexp.launch.slurm.submitit_keys import apply_submitit_options
from distexp.launch.snapshot import take_snapshot
from distexp.launch.sweep_dir import locked_sweep_dir
from distexp.runs.command_text import suggest_command

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

    Returns:
        Nothing: the jobs run without Hydra.
    """
    adjust = partial(apply_submitit_options, given)
    cells = compose_cells(context, master, overrides, adjust)
    make = cell_maker(context, master, adjust)
    first = cells[0].composed
    # Predictions may take minutes, so what would stop the submission is checked before them.
    max_array_size = 0 if _submits_nothing(master, first) else _check_slurm()
    if master.choose.only:
        _search(cells, master, make, max_array_size)
    elif plan_runs(cells, master, make):
        pass  # The prediction was all to do.
    elif first.cluster.dry_run:
        print_scripts(cells, Path(master.hydra.sweep.dir).absolute(), Console())
    else:
        _start_sweep(cells, master, max_array_size, Console())
    return []


def _submits_nothing(master: DictConfig, first: DictConfig) -> bool:
    """Return whether a command only prints something.

    Args:
        master: Configuration of the command.
        first: Configuration of its first cell.
    """
    return bool(first.cluster.dry_run or master.plan.only or (master.choose.only and master.choose.dry_run))


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


def _search(cells: Sequence[Cell], master: DictConfig, make: MakeCell, max_array_size: int) -> None:
    """Run ``distexp choose`` with trials on Slurm."""
    from distexp.choose.command import run_choose
    from distexp.launch.slurm.choose import SlurmTrials

    run_choose(cells, master, make, SlurmTrials(max_array_size, _trusted_packages(cells)))


def _start_sweep(cells: Sequence[Cell], master: DictConfig, max_array_size: int, console: Console) -> None:
    """Submit the runs of a sweep, and follow them unless ``cluster.wait=false``."""
    sweep_dir = _submit_sweep(cells, master, max_array_size, console)
    print_plain(console, f"sweep: {sweep_dir}")
    if cells[0].composed.cluster.wait:
        follow(sweep_dir, console)
    else:
        print_plain(console, f"status: {suggest_command('status', sweep_dir)}")


def _submit_sweep(cells: Sequence[Cell], master: DictConfig, max_array_size: int, console: Console) -> Path:
    """Prepare and submit the runs of a sweep; return its directory.

    Raises:
        SweepInterrupted: On Ctrl-C.
    """
    with locked_sweep_dir(master, len(cells)) as claimed:
        sweep_dir = claimed.absolute()
        try:
            snapshot = take_snapshot(sweep_dir, _trusted_packages(cells), partial(print_plain, console))
            prepared = list(prepare_runs(cells, sweep_dir, snapshot, console, resume=master.sweep.resume))
        except KeyboardInterrupt:
            hint = suggest_command("resume", sweep_dir)
            raise SweepInterrupted(f"interrupted: nothing was submitted; to submit the runs: {hint}") from None
        submit_runs(prepared, sweep_dir, snapshot.folder, max_array_size, console)
    return sweep_dir


def _trusted_packages(cells: Sequence[Cell]) -> list[str]:
    return list(cells[0].composed.trusted_packages)

"""Local launcher: the runs of a sweep one after the other on this machine, then a table."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.utils import JobReturn, env_override
from hydra.types import HydraContext
from omegaconf import DictConfig

from distexp.launch.cell import Cell
from distexp.launch.composition import cell_maker, compose_cells
from distexp.launch.local.hangup import continue_after_hangup
from distexp.launch.local.process_memory import refuse_too_many_processes
from distexp.launch.local.shared_start import SharedStart
from distexp.launch.plan_runs import plan_runs
from distexp.launch.sweep_dir import locked_sweep_dir
from distexp.runs.record_sections import RunInfo
from distexp.runs.spec import RunSpec


def run_sweep(context: HydraContext, master: DictConfig, overrides: Sequence[Sequence[str]]) -> list[JobReturn]:
    """Run every cell, even if others fail.

    Raises:
        ConfigError: if there is one cell only, and it needs more memory than this machine has.
        SweepFailedError: at the end, if a run failed.
        InterruptedRunError: if a run was interrupted. The cells after it are not started.
    """
    cells, make = compose_cells(context, master, overrides), cell_maker(context, master)
    if master.choose.only:
        from distexp.choose.command import run_choose
        from distexp.launch.local.choose import LocalTrials

        run_choose(cells, master, make, LocalTrials(context))
        return []
    if plan_runs(cells, master, make):
        return []
    if not master.sweep.resume:  # An invalid cell would match no run that the sweep has already.
        refuse_too_many_processes(cells)
    with SharedStart(shares_weights=_shares_weights(cells)) as shared_start:
        if not master.sweep.resume:  # All of its cells may be done.
            _prepare_first(cells, master, shared_start)
        # What shows the runs is imported while the libraries of the workers are.
        from distexp.launch.local.runner import run_cells

        with locked_sweep_dir(master, len(cells)) as sweep_dir, continue_after_hangup(sweep_dir):
            return run_cells(context, master, cells, sweep_dir, shared_start)


def _shares_weights(cells: Sequence[Cell]) -> bool:
    """Return whether several cells may have the same random weights. They are kept in memory between the runs."""
    configs = [cell.config for cell in cells if cell.config is not None]
    return len({f"{config.model} {config.train.seed}" for config in configs}) < len(configs)


def _prepare_first(cells: Sequence[Cell], master: DictConfig, shared_start: SharedStart) -> None:
    """Start the imports of the first valid cell before its run is prepared, with the environment of a Hydra job."""
    for cell in cells:
        if cell.config is not None:
            with env_override(dict(master.hydra.job.env_set)):
                shared_start.prepare(RunSpec(cell.config, RunInfo(cell.id, cell.config.name, 0, [])))
            return

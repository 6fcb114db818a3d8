"""Local launcher: the runs of a sweep one after the other on this machine, then a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from hydra.core.utils import JobReturn
from hydra.types import HydraContext
from omegaconf import DictConfig

from distexp.console.screen import Screen
from distexp.exceptions import InterruptedRunError, SweepFailedError
from distexp.launch.assigned_runs import ExistingRunRules, assign_run_dirs
from distexp.launch.cell import Cell
from distexp.launch.composition import cell_maker, compose_cells
from distexp.launch.git_state import package_git_state
from distexp.launch.local.crowded_cores import crowded_core_warnings
from distexp.launch.local.hangup import continue_after_hangup
from distexp.launch.local.process_memory import refuse_too_many_processes
from distexp.launch.local.runner import CellRunner, show_if_done
from distexp.launch.local.shared_start import SharedStart
from distexp.launch.plan_runs import plan_runs
from distexp.launch.sweep_dir import locked_sweep_dir
from distexp.runs.failure_text import join_errors
from distexp.runs.record import FAILURES


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
    with locked_sweep_dir(master, len(cells)) as sweep_dir, continue_after_hangup(sweep_dir):
        return _run_cells(context, master, cells, sweep_dir)


def _run_cells(context: HydraContext, master: DictConfig, cells: Sequence[Cell], sweep_dir: Path) -> list[JobReturn]:
    for warning in crowded_core_warnings(cell.config for cell in cells if cell.config is not None):
        print(f"distexp: warning: {warning}", file=sys.stderr)
    invalid = [join_errors(cell.errors) for cell in cells if cell.config is None]
    screen = Screen(total=len(cells), sweep_dir=sweep_dir, invalid=invalid)
    rules = ExistingRunRules(should_skip=lambda run: show_if_done(screen, run.directory), warn=screen.print)
    runs = assign_run_dirs(cells, sweep_dir, package_git_state(), rules, resume=master.sweep.resume)
    try:
        with _shared_start(master, len(cells), screen) as shared_start:
            runner = CellRunner(context, screen, shared_start)
            returns = [done for run in runs if (done := runner.run_if_free(run)) is not None]
    except (InterruptedRunError, KeyboardInterrupt, OSError):
        screen.show_interrupted()
        raise
    screen.show_comparison()
    if any(record.status in FAILURES for record in screen.records):
        raise SweepFailedError
    return returns


def _shared_start(master: DictConfig, cells: int, screen: Screen) -> AbstractContextManager[SharedStart | None]:
    """Return the start-up that the runs of a sweep share, if ``sweep.shared_start`` is set. A single run has none."""
    return SharedStart(screen.print) if master.sweep.shared_start and cells > 1 else nullcontext()

"""Local launcher: the runs of a sweep one after the other on this machine, then a table."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, run_job
from hydra.types import HydraContext
from omegaconf import DictConfig

from distexp.console.screen import Screen
from distexp.exceptions import InterruptedRunError, SweepFailedError
from distexp.launch.composition import Cell, cell_maker, compose_cells
from distexp.launch.git_state import package_git_state
from distexp.launch.local.hangup import continue_after_hangup
from distexp.launch.local.run import run_locally
from distexp.launch.local.warm_start import WarmStart
from distexp.launch.plan_runs import plan_runs
from distexp.launch.sweep import AssignedRun, assign_run_dirs, locked_sweep_dir, write_invalid
from distexp.runs.command_text import format_override
from distexp.runs.existing import DONE
from distexp.runs.failure_text import join_errors
from distexp.runs.full_disk import name_folder, release_reserve
from distexp.runs.owner import wait_for_agent
from distexp.runs.record import FAILURES, RunRecord
from distexp.runs.run_dir import RECORD
from distexp.runs.run_lock import run_lock
from distexp.runs.spec import RunSpec


def run_sweep(context: HydraContext, master: DictConfig, overrides: Sequence[Sequence[str]]) -> list[JobReturn]:
    """Run every cell, even if others fail.

    Raises:
        SweepFailedError: at the end, if a run failed.
        InterruptedRunError: if a run was interrupted. The cells after it are not started.
    """
    cells = compose_cells(context, master, overrides)
    if master.choose.only:
        from distexp.choose.command import run_choose
        from distexp.launch.local.choose import LocalTrials

        run_choose(cells, master, cell_maker(context, master), LocalTrials(context))
        return []
    if plan_runs(cells, master, cell_maker(context, master)):
        return []
    with locked_sweep_dir(master, len(cells)) as sweep_dir, continue_after_hangup(sweep_dir):
        return _run_cells(context, master, cells, sweep_dir)


def _run_cells(context: HydraContext, master: DictConfig, cells: Sequence[Cell], sweep_dir: Path) -> list[JobReturn]:
    invalid = [join_errors(cell.errors) for cell in cells if cell.config is None]
    screen = Screen(total=len(cells), sweep_dir=sweep_dir, invalid=invalid)
    code, resume = package_git_state(), master.sweep.resume
    runs = assign_run_dirs(
        cells,
        sweep_dir,
        code,
        resume=resume,
        should_skip=lambda run: _show_if_done(screen, run.directory),
        warn=screen.print,
    )
    try:
        with shared_start_up(master, len(cells), screen) as warm:
            found = (run_if_free(context, run, screen, warm) for run in runs)
            returns = [done for done in found if done is not None]
    except (InterruptedRunError, KeyboardInterrupt, OSError):
        screen.show_interrupted()
        raise
    screen.show_comparison()
    if any(record.status in FAILURES for record in screen.records):
        raise SweepFailedError
    return returns


def _show_if_done(screen: Screen, directory: Path) -> bool:
    """Show the run of a directory and return True, if it has a readable record and needs no further attempt."""
    try:
        record = RunRecord.read(directory / RECORD)
    except ValueError:
        return False
    if record.status in DONE:
        screen.show_skipped(record)
    return record.status in DONE


def shared_start_up(master: DictConfig, cells: int, screen: Screen) -> AbstractContextManager[WarmStart | None]:
    """Return the start-up that the runs of a sweep share, if ``sweep.shared_start`` is set. A single run has none."""
    return WarmStart(screen.print) if master.sweep.shared_start and cells > 1 else nullcontext()


def run_if_free(context: HydraContext, run: AssignedRun, screen: Screen, warm: WarmStart | None) -> JobReturn | None:
    """Run a cell, unless another command runs it or has just finished it."""
    with run_lock(run.directory) as other:
        owner = other or wait_for_agent(run.directory)
        if owner is not None:
            screen.show_busy(run.info.number, owner)
            return None
        if _show_if_done(screen, run.directory):
            return None
        return _as_job(context, run, screen, warm)


def _as_job(context: HydraContext, run: AssignedRun, screen: Screen, warm: WarmStart | None) -> JobReturn:
    """Run one cell as a Hydra job, with Hydra's callbacks and its ``.hydra/`` folder."""
    failures: list[OSError] = []

    def task(_: Any) -> str | None:
        if run.cell.config is not None:
            screen.run_header(run.info.number, " ".join(map(format_override, run.cell.varied)))
        try:
            return _run(run, screen, warm).status
        except OSError as error:  # Hydra would print a line about it.
            failures.append(error)
            return None

    with name_folder(run.directory):
        done = run_job(
            hydra_context=context,
            task_function=task,
            config=run.composed,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        if failures:
            with suppress(OSError):  # The first error matters.
                release_reserve(run.directory)
            raise failures[0]
        done.return_value  # noqa: B018  # It raises what the task raised.
    done.cfg = done.hydra_cfg = None  # Thousands of configurations would fill the memory.
    return done


def _run(run: AssignedRun, screen: Screen, warm: WarmStart | None) -> RunRecord:
    if run.cell.config is not None:
        run.cell.write_prediction(run.directory)
        return run_locally(RunSpec(run.cell.config, run.info), run.directory, screen, warm)
    record = write_invalid(run)
    screen.show_invalid(record)
    return record

"""Local launcher: the runs of a sweep one after the other on this machine, then a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, run_job
from hydra.types import HydraContext
from omegaconf import DictConfig

from distexp.config.paths import PACKAGE
from distexp.console.screen import Screen
from distexp.exceptions import InterruptedRunError, SweepFailedError
from distexp.launch.local.hangup import continue_after_hangup
from distexp.launch.local.run import run_locally
from distexp.launch.snapshot import git_root, git_state
from distexp.launch.sweep import (
    Cell,
    assign_run_dirs,
    compose_cells,
    create_sweep_dir,
    write_invalid,
    write_sweep_files,
)
from distexp.runs.existing import DONE, ExistingRun
from distexp.runs.record import FAILURES, RunInfo, RunRecord
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
    sweep_dir = create_sweep_dir(master)
    write_sweep_files(master, sweep_dir, len(cells))
    with continue_after_hangup(sweep_dir):
        return _run_cells(context, master, cells, sweep_dir)


def _run_cells(context: HydraContext, master: DictConfig, cells: Sequence[Cell], sweep_dir: Path) -> list[JobReturn]:
    screen = Screen(total=len(cells), sweep_dir=sweep_dir, invalid=sum(cell.config is None for cell in cells))

    def should_skip(run: ExistingRun) -> bool:
        return _show_if_done(run.directory, screen)

    code = git_state(git_root(PACKAGE))
    runs = assign_run_dirs(
        cells, sweep_dir, code, resume=master.sweep.resume, should_skip=should_skip, warn=screen.print
    )
    try:
        returns = [
            done
            for cell, info, directory in runs
            if (done := _run_if_free(context, cell, info, directory, screen=screen)) is not None
        ]
    except InterruptedRunError:
        screen.show_interrupted()
        raise
    screen.show_comparison()
    if any(record.status in FAILURES for record in screen.records):
        raise SweepFailedError
    return returns


def _show_if_done(directory: Path, screen: Screen) -> bool:
    """Show the run of a directory and return True, if it has a readable record and needs no further attempt."""
    try:
        record = RunRecord.read(directory / RECORD)
    except ValueError:
        return False
    if record.status in DONE:
        screen.show_skipped(record)
    return record.status in DONE


def _run_if_free(
    context: HydraContext, cell: Cell, info: RunInfo, directory: Path, *, screen: Screen
) -> JobReturn | None:
    """Run a cell, unless another command runs it or has just finished it."""
    with run_lock(directory) as owner:
        if owner is not None:
            screen.show_busy(info.number, owner)
            return None
        if _show_if_done(directory, screen):
            return None
        return _as_job(context, cell, info, directory, screen=screen)


def _as_job(context: HydraContext, cell: Cell, info: RunInfo, directory: Path, *, screen: Screen) -> JobReturn:
    """Run one cell as a Hydra job, with Hydra's callbacks and its ``.hydra/`` folder."""

    def task(_: Any) -> str:
        screen.run_header(info.number, " ".join(cell.varied).replace("'", ""))
        return _run(cell, info, directory, screen).status

    done = run_job(
        hydra_context=context,
        task_function=task,
        config=cell.composed,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
    done.return_value  # noqa: B018  # It raises what the task raised.
    return done


def _run(cell: Cell, info: RunInfo, directory: Path, screen: Screen) -> RunRecord:
    if cell.config is not None:
        return run_locally(RunSpec(cell.config, info), directory, screen)
    record = write_invalid(cell, info, directory)
    screen.show_invalid(record)
    return record

"""The local launcher: one run after the other on this machine, and a table when all are done."""

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
from distexp.launch.local.run import run_locally
from distexp.launch.snapshot import git_root, git_state
from distexp.launch.sweep import Cell, assign_run_dirs, compose_cells, save_master, sweep_directory, write_invalid
from distexp.runs.existing import DONE, ExistingRun
from distexp.runs.record import FAILURES, RECORD, RunInfo, RunRecord
from distexp.runs.spec import RunSpec


def run_sweep(context: HydraContext, master: DictConfig, overrides: Sequence[Sequence[str]]) -> list[JobReturn]:
    """Runs every cell, whatever becomes of the others; SweepFailedError at the end where one failed."""
    cells = compose_cells(context, master, overrides)
    sweep_dir = sweep_directory(master)
    save_master(master, sweep_dir, len(cells))
    screen = Screen(total=len(cells), sweep_dir=sweep_dir)

    def keep(run: ExistingRun) -> bool:
        if run.status in DONE:
            screen.show_skipped(RunRecord.read(run.directory / RECORD))
        return run.status in DONE

    code = git_state(git_root(PACKAGE))
    runs = assign_run_dirs(cells, sweep_dir, code, resume=master.sweep.resume, should_skip=keep, warn=screen.print)
    try:
        returns = [_as_job(context, cell, info, directory, screen=screen) for cell, info, directory in runs]
    except InterruptedRunError:
        screen.show_interrupted()
        raise
    screen.show_comparison()
    if any(record.status in FAILURES for record in screen.records):
        raise SweepFailedError
    return returns


def _as_job(context: HydraContext, cell: Cell, info: RunInfo, directory: Path, *, screen: Screen) -> JobReturn:
    """One cell as a job of Hydra: its callbacks and ``.hydra/`` are where its users expect them."""

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
    done.return_value  # noqa: B018  # raises what the task raised
    return done


def _run(cell: Cell, info: RunInfo, directory: Path, screen: Screen) -> RunRecord:
    if cell.config is not None:
        return run_locally(RunSpec(cell.config, info), directory, screen)
    record = write_invalid(cell, info, directory)
    screen.show_invalid(record)
    return record

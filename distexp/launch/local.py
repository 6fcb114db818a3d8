"""The local launcher: one run after the other on this machine, and a table when all are done."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, run_job
from hydra.types import HydraContext
from omegaconf import DictConfig

from distexp.exits import SweepFailedError
from distexp.job import run_here
from distexp.launch.earlier import DONE, EarlierRuns
from distexp.launch.snapshot import git_root, git_state
from distexp.launch.sweep import (
    Cell,
    claim_run_dir,
    compose_cells,
    place,
    run_info,
    save_master,
    sweep_directory,
    write_invalid,
)
from distexp.paths import PACKAGE
from distexp.results import FAILURES, RECORD, RunInfo, RunRecord
from distexp.screen import Screen
from distexp.spec import RunSpec


def run_sweep(context: HydraContext, master: DictConfig, overrides: Sequence[Sequence[str]]) -> list[JobReturn]:
    """Runs every cell, whatever becomes of the others; SweepFailedError at the end where one failed."""
    cells = compose_cells(context, master, overrides)
    sweep_dir = sweep_directory(master)
    save_master(master, sweep_dir)
    screen = Screen(total=len(cells), sweep_dir=sweep_dir)
    earlier = EarlierRuns.of(sweep_dir) if master.sweep.resume else EarlierRuns()
    code = git_state(git_root(PACKAGE))
    returns, number = [], 0
    for cell in cells:
        info = run_info(cell, number, code)
        known = earlier.take(info.id, info.overrides)
        if known is not None and known.status in DONE:
            screen.kept(RunRecord.read(known.directory / RECORD))
            continue
        if known is not None:
            info.number, directory = known.number, place(cell, sweep_dir, known.number)
        else:
            number, directory = claim_run_dir(partial(place, cell, sweep_dir), number)
            info.number, number = number, number + 1
        returns.append(_as_job(context, cell, info, directory, screen=screen))
    screen.compare()
    if any(record.status in FAILURES for record in screen.records):
        raise SweepFailedError
    return returns


def _as_job(context: HydraContext, cell: Cell, info: RunInfo, directory: Path, *, screen: Screen) -> JobReturn:
    """One cell as a job of Hydra: its callbacks and ``.hydra/`` are where its users expect them."""

    def task(_: Any) -> str:
        screen.headline(cell)
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
        return run_here(RunSpec(cell.config, info), directory, screen)
    record = write_invalid(cell, info, directory)
    screen.invalid(record)
    return record

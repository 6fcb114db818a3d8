"""The local launcher: one run after the other on this machine, and a table when all are done."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, run_job
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from distexp.exits import SweepFailedError
from distexp.identity import run_id
from distexp.job import run_here
from distexp.launch.sweep import (
    Cell,
    claim_run_dir,
    claim_sweep_dir,
    compose_cells,
    save_master,
)
from distexp.outcome import invalid_record
from distexp.resolve import without_hydra
from distexp.results import FAILURES, RunInfo, RunRecord
from distexp.screen import Screen
from distexp.spec import RunSpec


def run_sweep(context: HydraContext, master: DictConfig, overrides: Sequence[Sequence[str]]) -> list[JobReturn]:
    """Runs every cell, whatever becomes of the others; SweepFailedError at the end where one failed."""
    cells = compose_cells(context, master, overrides)
    chosen = any(text.startswith("hydra.sweep.dir=") for text in master.hydra.overrides.hydra)
    sweep_dir = claim_sweep_dir(Path(master.hydra.sweep.dir), chosen_by_user=chosen)
    save_master(master, sweep_dir)
    screen = Screen(total=len(cells), sweep_dir=sweep_dir)
    returns, number = [], 0
    for cell in cells:
        number, directory = claim_run_dir(partial(_directory, cell, sweep_dir), number)
        returns.append(_as_job(context, cell, number, directory, screen=screen))
        number += 1
    screen.compare()
    if any(record.status in FAILURES for record in screen.records):
        raise SweepFailedError
    return returns


def _directory(cell: Cell, sweep_dir: Path, number: int) -> Path:
    with open_dict(cell.composed):
        cell.composed.hydra.job.id = cell.composed.hydra.job.num = number
        cell.composed.hydra.sweep.dir = str(sweep_dir)
    return (sweep_dir / str(cell.composed.hydra.sweep.subdir)).absolute()


def _as_job(context: HydraContext, cell: Cell, number: int, directory: Path, *, screen: Screen) -> JobReturn:
    """One cell as a job of Hydra: its callbacks and ``.hydra/`` are where its users expect them."""

    def task(_: Any) -> str:
        screen.headline(cell)
        return _run(cell, number, directory, screen).status

    done = run_job(
        hydra_context=context,
        task_function=task,
        config=cell.composed,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
    done.return_value  # noqa: B018  # raises what the task raised
    return done


def _run(cell: Cell, number: int, directory: Path, screen: Screen) -> RunRecord:
    overrides = [text.replace("'", "") for text in cell.overrides]
    if cell.config is not None:
        info = RunInfo(id=run_id(cell.config), name=cell.config.name, number=number, overrides=overrides)
        return run_here(RunSpec(cell.config, info), directory, screen)
    content: Any = OmegaConf.to_container(without_hydra(cell.composed))
    record = invalid_record(RunInfo("invalid", str(content["name"]), number, overrides), content, cell.faults)
    record.write(directory)
    screen.invalid(record)
    return record

"""The local launcher: one run after the other on this machine, and a table when all are done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, run_job
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from distexp.config import Config
from distexp.identity import run_id
from distexp.job import invalid_record, run_job_to_record
from distexp.launch.sweep import Cell, SweepFailed, claim_run_dir, claim_sweep_dir, compose_cells, save_master
from distexp.resolve import without_hydra
from distexp.results import FAILURES, RunInfo, RunRecord
from distexp.screen import Screen
from distexp.spec import RunSpec


def run_sweep(
    context: HydraContext, master: DictConfig, overrides: Sequence[Sequence[str]]
) -> list[JobReturn]:
    """Runs every cell, whatever becomes of the others; SweepFailed at the end where one failed."""
    cells = compose_cells(context, master, overrides)
    chosen = any(text.startswith("hydra.sweep.dir=") for text in master.hydra.overrides.hydra)
    sweep_dir = claim_sweep_dir(Path(master.hydra.sweep.dir), chosen_by_user=chosen)
    save_master(master, sweep_dir)
    screen = Screen(total=len(cells))
    records: list[RunRecord] = []
    returns: list[JobReturn] = []
    number = 0
    for cell in cells:
        number, directory = claim_run_dir(lambda n, cell=cell: _directory(cell, sweep_dir, n), number)
        record = _run(context, cell, number, directory, screen, returns)
        records.append(record)
        number += 1
    screen.compare(records, sweep_dir)
    if any(record.status in FAILURES for record in records):
        raise SweepFailed
    return returns


def _directory(cell: Cell, sweep_dir: Path, number: int) -> Path:
    with open_dict(cell.composed):
        cell.composed.hydra.job.id = cell.composed.hydra.job.num = number
        cell.composed.hydra.sweep.dir = str(sweep_dir)
    return (sweep_dir / str(cell.composed.hydra.sweep.subdir)).absolute()


def _run(
    context: HydraContext,
    cell: Cell,
    number: int,
    directory: Path,
    screen: Screen,
    returns: list[JobReturn],
) -> RunRecord:
    """One cell as a job of Hydra: its callbacks and ``.hydra/`` are where its users expect them."""
    records: list[RunRecord] = []

    def task(_: Any) -> str:
        if cell.config is None:
            plain: Any = OmegaConf.to_container(without_hydra(cell.composed))
            info = RunInfo("invalid", str(plain["name"]), number, cell.overrides)
            record = invalid_record(info, plain, cell.faults)
            record.write(directory)
            screen.invalid(record)
        else:
            spec = RunSpec(cell.config, _info(cell.config, number, cell.overrides))
            record = run_job_to_record(spec, directory, screen)
        records.append(record)
        return record.status

    returns.append(
        run_job(
            hydra_context=context,
            task_function=task,
            config=cell.composed,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
    )
    returns[-1].return_value  # noqa: B018  # raises what the task raised
    return records[0]


def _info(config: Config, number: int, overrides: list[str]) -> RunInfo:
    return RunInfo(id=run_id(config), name=config.name, number=number, overrides=overrides)

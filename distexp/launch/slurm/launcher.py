"""The Slurm launcher: every cell composed once, the runs grouped by shape, an array submitted for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from hydra.core.utils import JobReturn
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from distexp.config import ConfigError
from distexp.launch import ledger
from distexp.launch.outcome import failed_record
from distexp.launch.slurm import client
from distexp.launch.slurm.follow import follow, some
from distexp.launch.slurm.script import FOLDER, Array, shape
from distexp.launch.slurm.status import ACTIVE, look
from distexp.launch.slurm.submitit_keys import adopt
from distexp.launch.snapshot import NAME, GitState, take
from distexp.launch.sweep import Cell, assign_run_dirs, compose_cells, save_master, sweep_directory, write_invalid
from distexp.runs import attempts
from distexp.runs.existing import DONE, ExistingRun
from distexp.runs.record import RunError, write_json
from distexp.runs.spec import RunSpec

NOT_CONFIGURED = "configuration source"
"""Of what Slurm's commands say where Slurm is installed, and no more."""


@dataclass(frozen=True)
class Prepared:
    """A run with its directory, ready to be submitted."""

    spec: RunSpec
    directory: Path


def run_sweep(
    context: HydraContext, master: DictConfig, overrides: Sequence[Sequence[str]], given: Mapping[str, Any]
) -> list[JobReturn]:
    """Submits every cell, and follows the runs where ``cluster.wait`` says so."""
    cells = compose_cells(context, master, overrides, partial(adopt, given))
    how = cells[0].composed.cluster
    console = Console()
    if how.dry_run:
        show(cells, Path(master.hydra.sweep.dir).absolute(), console)
        return []
    if not client.available():
        raise ConfigError(
            "cluster=slurm needs sbatch, which is not on this machine's PATH: log in to the cluster, or look at the "
            "sbatch files with cluster.dry_run=true"
        )
    try:
        longest = client.max_array_size()
    except client.SlurmError as error:
        if NOT_CONFIGURED in str(error):
            raise ConfigError(
                f"cluster=slurm needs a configured Slurm, which this machine has not ({error}): log in to a node of "
                "the cluster, or set cluster=local; python -m distexp.doctor says more"
            ) from None
        raise OSError(f"Slurm does not answer ({error}), nothing was submitted: try it again later") from None
    sweep_dir = sweep_directory(master).absolute()
    save_master(master, sweep_dir, len(cells))
    snapshot, code = take(sweep_dir, list(cells[0].composed.trusted_packages))
    prepared = list(prepare(cells, sweep_dir, master.sweep.resume, (code, snapshot), console))
    submit(prepared, sweep_dir, snapshot, longest, console)
    console.print(f"sweep: {sweep_dir}", highlight=False, soft_wrap=True)
    if how.wait:
        follow(sweep_dir, console)
    else:
        console.print(f"status: python -m distexp.status {sweep_dir}", highlight=False, soft_wrap=True)
    return []


def prepare(
    cells: Sequence[Cell], sweep_dir: Path, resume: bool, code: tuple[GitState, Path], console: Console
) -> Iterator[Prepared]:
    """Gives each cell its directory and writes what its job starts from; an invalid one gets its record."""
    active = {run.number for run in look(sweep_dir) if run.state in ACTIVE} if resume else set()

    def keep(run: ExistingRun) -> bool:
        kept = run.status in DONE or run.number in active
        if kept:
            console.print(f"run {run.number}: {run.status or 'not ended'}, kept", highlight=False)
        return kept

    tell = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    snapshot = str(code[1].relative_to(sweep_dir))
    for cell, info, directory in assign_run_dirs(
        cells, sweep_dir, code[0], resume=resume, should_skip=keep, warn=tell, snapshot=snapshot, active=active
    ):
        write_hydra(cell, directory)
        if cell.config is None:
            record = write_invalid(cell, info, directory)
            assert record.error is not None
            console.print(
                f"run {info.number}: invalid: {record.error.message}", highlight=False, markup=False, soft_wrap=True
            )
            continue
        info.attempts = attempts.read_attempts(directory)
        attempts.archive_previous(directory)
        spec = RunSpec(cell.config, info)
        spec.write(directory)
        yield Prepared(spec, directory)


def write_hydra(cell: Cell, directory: Path) -> None:
    """``.hydra/``, as Hydra itself leaves it."""
    folder = directory / ".hydra"
    folder.mkdir(parents=True, exist_ok=True)
    content = OmegaConf.to_container(cell.composed, enum_to_str=True)
    assert isinstance(content, dict)
    hydra = content.pop("hydra")
    parts = {"overrides": hydra["overrides"]["task"], "hydra": {"hydra": hydra}, "config": content}
    for name, part in parts.items():
        # The same YAML as OmegaConf's own, ten times as fast: a sweep may have hundreds of runs.
        (folder / f"{name}.yaml").write_text(yaml.dump(part, Dumper=yaml.CSafeDumper, sort_keys=False))


def submit(prepared: Sequence[Prepared], sweep_dir: Path, snapshot: Path, longest: int, console: Console) -> None:
    """One array a shape, or several where one would be longer than Slurm allows; each is in the ledger at once."""
    (sweep_dir / FOLDER).mkdir(exist_ok=True)
    for group in grouped(prepared):
        for start in range(0, len(group), longest):
            part = group[start : start + longest]
            directories = tuple(str(run.directory.relative_to(sweep_dir)) for run in part)
            array = Array(free_name(sweep_dir), part[0].spec.config, sweep_dir, snapshot, directories)
            write_json(array.list_path, {"directories": directories})
            array.script_path.write_text(array.text())
            try:
                job = client.submit(array.script_path)
            except client.UnreachableError as error:
                raise OSError(
                    f"Slurm does not answer ({error}), {array.name} was not submitted: resume it later"
                ) from None
            except client.SlurmError as error:
                refuse(part, str(error), console)
                continue
            entries = [
                ledger.Entry(run.spec.run.number, run.spec.run.id, where, f"{job}_{index}", "submitted")
                for index, (run, where) in enumerate(zip(part, directories, strict=True))
            ]
            ledger.append(sweep_dir, entries)
            console.print(f"job {job}: {described(part)}", highlight=False)


def refuse(part: Sequence[Prepared], why: str, console: Console) -> None:
    """The records of runs that Slurm would not take; the other shapes go on."""
    for run in part:
        error = RunError("SubmissionRefused", f"sbatch: {why}")
        record = failed_record(run.spec, run.directory, "invalid", error, None)
        record.write(run.directory)
    console.print(f"{described(part)}: Slurm refuses: {why}", highlight=False, markup=False, soft_wrap=True)


def grouped(prepared: Sequence[Prepared]) -> list[list[Prepared]]:
    """The runs by shape, in the order in which the shapes come first."""
    groups: dict[str, list[Prepared]] = {}
    for run in prepared:
        groups.setdefault(shape(run.spec.config), []).append(run)
    return list(groups.values())


def free_name(sweep_dir: Path) -> str:
    """``array0``, or the first that this sweep has not submitted yet."""
    taken = len(list((sweep_dir / FOLDER).glob("array*.sbatch")))
    return f"array{taken}"


def described(part: Sequence[Prepared]) -> str:
    """``runs 0 to 5, 2 nodes of 2 cpu workers``."""
    cluster, numbers = part[0].spec.config.cluster, [run.spec.run.number for run in part]
    runs = f"run{'s' if len(numbers) > 1 else ''} {some(numbers)}"
    nodes = f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''}"
    workers = f"{cluster.workers_per_node} {cluster.device} worker{'s' if (cluster.workers_per_node or 0) > 1 else ''}"
    return f"{runs}, {nodes} of {workers}"


def show(cells: Sequence[Cell], sweep_dir: Path, console: Console) -> None:
    """The sbatch files of a sweep as they would be; nothing is written."""
    groups: dict[str, list[tuple[int, Cell]]] = {}
    for number, cell in enumerate(cells):
        if cell.config is None:
            console.print(
                f"# run {number}: invalid: {' | '.join(cell.errors)}", highlight=False, markup=False, soft_wrap=True
            )
        else:
            groups.setdefault(shape(cell.config), []).append((number, cell))
    for index, members in enumerate(groups.values()):
        config = members[0][1].config
        assert config is not None
        directories = tuple(str(number) for number, _ in members)
        array = Array(f"array{index}", replace(config), sweep_dir, sweep_dir / NAME, directories)
        console.print(f"# runs {', '.join(directories)}", highlight=False)
        console.print(array.text(), highlight=False, markup=False, soft_wrap=True)

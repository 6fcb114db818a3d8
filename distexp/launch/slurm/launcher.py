"""Submission of a sweep to Slurm: runs with equal resources become one job array."""

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
from distexp.launch.slurm.follow import follow
from distexp.launch.slurm.script import JobArray, resource_key
from distexp.launch.slurm.status import poll
from distexp.launch.slurm.submitit_keys import apply_submitit_options
from distexp.launch.snapshot import GitState, take_snapshot
from distexp.launch.sweep import (
    Cell,
    assign_run_dirs,
    compose_cells,
    create_sweep_dir,
    write_invalid,
    write_sweep_files,
)
from distexp.runs import attempts
from distexp.runs.existing import DONE, ExistingRun
from distexp.runs.files import write_json
from distexp.runs.record import RunError
from distexp.runs.run_dir import HYDRA, SLURM, SNAPSHOT
from distexp.runs.spec import RunSpec
from distexp.runs.text import failure_text, format_count, format_runs, suggest_command

NOT_CONFIGURED = "configuration source"
"""Part of the error message of Slurm's commands if Slurm is installed but not configured."""


@dataclass(frozen=True)
class PreparedRun:
    """A run with its directory, ready to be submitted."""

    spec: RunSpec
    directory: Path


def run_sweep(
    context: HydraContext, master: DictConfig, overrides: Sequence[Sequence[str]], given: Mapping[str, Any]
) -> list[JobReturn]:
    """Submit every cell, and follow the runs unless ``cluster.wait=false``.

    Args:
        context: Hydra's configuration loader and callbacks.
        master: Configuration of the command, with Hydra's node.
        overrides: The overrides of each cell.
        given: Options under ``hydra.launcher``.
    """
    cells = compose_cells(context, master, overrides, partial(apply_submitit_options, given))
    cluster = cells[0].composed.cluster
    console = Console()
    if cluster.dry_run:
        print_scripts(cells, Path(master.hydra.sweep.dir).absolute(), console)
        return []
    max_size = _check_slurm()
    sweep_dir = create_sweep_dir(master).absolute()
    write_sweep_files(master, sweep_dir, len(cells))
    snapshot, git = take_snapshot(sweep_dir, list(cells[0].composed.trusted_packages), partial(_print, console))
    prepared = list(prepare_runs(cells, sweep_dir, snapshot, git, console, resume=master.sweep.resume))
    submit_runs(prepared, sweep_dir, snapshot, max_size, console)
    _print(console, f"sweep: {sweep_dir}")
    if cluster.wait:
        follow(sweep_dir, console)
    else:
        _print(console, f"status: {suggest_command('status', sweep_dir)}")
    return []


def _print(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


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


def prepare_runs(
    cells: Sequence[Cell], sweep_dir: Path, snapshot: Path, git: GitState, console: Console, *, resume: bool
) -> Iterator[PreparedRun]:
    """Give each cell its directory, and write the spec of its run.

    An invalid cell gets its record instead.

    Args:
        cells: All cells of the sweep.
        sweep_dir: Directory of the sweep.
        snapshot: Folder with the copy of the code.
        git: State of the checkout that was copied.
        console: Where to report runs that are skipped or invalid.
        resume: Whether the directory may hold runs of an earlier command.
    """
    active = {run.number for run in poll(sweep_dir) if run.is_active} if resume else set()

    def should_skip(run: ExistingRun) -> bool:
        if run.number in active:
            _print(console, f"run {run.number}: already submitted")
            return True
        if run.status in DONE:
            _print(console, f"run {run.number}: already {run.status}")
            return True
        return False

    for cell, info, directory in assign_run_dirs(
        cells,
        sweep_dir,
        git,
        resume=resume,
        should_skip=should_skip,
        warn=partial(_print, console),
        snapshot=str(snapshot.relative_to(sweep_dir)),
        active=active,
    ):
        write_hydra_files(cell, directory)
        if cell.config is None:
            record = write_invalid(cell, info, directory)
            _print(console, f"run {info.number}: invalid: {failure_text(record)}")
            continue
        info.attempts = attempts.read_attempts(directory)
        attempts.archive_previous(directory)
        spec = RunSpec(cell.config, info)
        spec.write(directory)
        yield PreparedRun(spec, directory)


def write_hydra_files(cell: Cell, directory: Path) -> None:
    """Write ``.hydra/`` with the files that Hydra itself writes."""
    folder = directory / HYDRA
    folder.mkdir(parents=True, exist_ok=True)
    content = OmegaConf.to_container(cell.composed, enum_to_str=True)
    assert isinstance(content, dict)
    hydra = content.pop("hydra")
    parts = {"overrides": hydra["overrides"]["task"], "hydra": {"hydra": hydra}, "config": content}
    for name, part in parts.items():
        # The same YAML as OmegaConf.save writes, ten times as fast: a sweep may have hundreds of runs.
        (folder / f"{name}.yaml").write_text(yaml.dump(part, Dumper=yaml.CSafeDumper, sort_keys=False))


def submit_runs(
    prepared: Sequence[PreparedRun], sweep_dir: Path, snapshot: Path, max_size: int, console: Console
) -> None:
    """Submit one array for each set of runs with equal resources.

    A set with more than ``max_size`` runs is split into several arrays.
    """
    (sweep_dir / SLURM).mkdir(exist_ok=True)
    for group in group_by_resources(prepared):
        for start in range(0, len(group), max_size):
            _submit_array(group[start : start + max_size], sweep_dir, snapshot, console)


def _submit_array(runs: Sequence[PreparedRun], sweep_dir: Path, snapshot: Path, console: Console) -> None:
    """Submit runs as one array, and add them to the ledger at once."""
    directories = tuple(str(run.directory.relative_to(sweep_dir)) for run in runs)
    array = JobArray(next_array_name(sweep_dir), runs[0].spec.config, sweep_dir, snapshot, directories)
    write_json(array.list_path, {"directories": directories})
    array.script_path.write_text(array.render())
    try:
        job = client.submit(array.script_path)
    except client.UnreachableError as error:
        raise OSError(
            f"Slurm does not answer ({error}); {array.name} was not submitted: try again later with "
            f"{suggest_command('resume', sweep_dir)}"
        ) from None
    except client.SlurmError as error:
        record_refusal(runs, str(error), console)
        return
    entries = [
        ledger.Entry(run.spec.run.number, run.spec.run.id, directory, f"{job}_{index}", "submitted")
        for index, (run, directory) in enumerate(zip(runs, directories, strict=True))
    ]
    ledger.append(sweep_dir, entries)
    _print(console, f"job {job}: {describe_runs(runs)}")


def record_refusal(runs: Sequence[PreparedRun], reason: str, console: Console) -> None:
    """Write the records of runs that Slurm refused.

    The other arrays are still submitted.
    """
    for run in runs:
        error = RunError("SubmissionRefused", f"sbatch: {reason}")
        record = failed_record(run.spec, run.directory, "invalid", error, None)
        record.write(run.directory)
    _print(console, f"{describe_runs(runs)}: refused by Slurm: {reason}")


def group_by_resources(prepared: Sequence[PreparedRun]) -> list[list[PreparedRun]]:
    """Group the runs by what their jobs request, in the order of first appearance."""
    groups: dict[str, list[PreparedRun]] = {}
    for run in prepared:
        groups.setdefault(resource_key(run.spec.config), []).append(run)
    return list(groups.values())


def next_array_name(sweep_dir: Path) -> str:
    """Return ``array0``, or the next number that this sweep has not used."""
    used = len(list((sweep_dir / SLURM).glob("array*.sbatch")))
    return f"array{used}"


def describe_runs(runs: Sequence[PreparedRun]) -> str:
    """Describe runs of one array: ``runs 0-5, 2 nodes with 2 cpu workers each``."""
    cluster = runs[0].spec.config.cluster
    numbers = format_runs([run.spec.run.number for run in runs])
    workers = format_count(cluster.workers_per_node or 1, f"{cluster.device} worker")
    each = " each" if cluster.nodes > 1 else ""
    return f"{numbers}, {format_count(cluster.nodes, 'node')} with {workers}{each}"


def print_scripts(cells: Sequence[Cell], sweep_dir: Path, console: Console) -> None:
    """Print the sbatch files of a sweep without writing or submitting anything."""
    groups: dict[str, list[tuple[int, Cell]]] = {}
    for number, cell in enumerate(cells):
        if cell.config is None:
            _print(console, f"# run {number}: invalid: {' | '.join(cell.errors)}")
        else:
            groups.setdefault(resource_key(cell.config), []).append((number, cell))
    for index, members in enumerate(groups.values()):
        config = members[0][1].config
        assert config is not None
        directories = tuple(str(number) for number, _ in members)
        array = JobArray(f"array{index}", replace(config), sweep_dir, sweep_dir / SNAPSHOT, directories)
        _print(console, f"# {format_runs([number for number, _ in members])}")
        _print(console, array.render())

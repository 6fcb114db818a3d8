"""The directories of a sweep and its runs: numbers, claims, locks and the git state."""

from __future__ import annotations

import fcntl
import glob
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, cast

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from distexp.compose.composition import Cell
from distexp.config import Config, ConfigError
from distexp.config.fields import info_of
from distexp.config.keys import get_value, schema_fields
from distexp.config.model_checks import names_source
from distexp.config.overrides import (
    SINGLE_RUN,
    copyable_overrides,
    format_override,
    join_first,
    shell_quote,
    suggest_command,
    sweep_dir_override,
)
from distexp.guard.config_files import check_files, remember_file
from distexp.launch.outcome import invalid_record
from distexp.resolve import without_hydra
from distexp.resolve.run_id import fits_checkpoint
from distexp.runs import attempts, texts
from distexp.runs.record import ExistingRun, ExistingRuns, RunRecord, RunSpec, unmatched_message
from distexp.runs.record_sections import RunInfo
from distexp.runs.run_dir import ATTEMPT_FILES, CHECKPOINTS, COMMAND, HYDRA, LEDGER, MULTIRUN, PREDICTED, RECORD, SPEC
from distexp.system import files, typed_values
from distexp.system.files import PACKAGE, read_or_none, write_json


@dataclass(frozen=True)
class AssignedRun:
    """A cell with the number and the directory of its run."""

    cell: Cell
    info: RunInfo
    directory: Path
    composed: DictConfig  # Composed configuration of the cell, with the number and the directory in its hydra node.


def make_run_info(cell: Cell, number: int, code: GitState, snapshot: str | None = None) -> RunInfo:
    """Return the identity of a cell's run."""
    name = str(cell.composed.name) if cell.config is None else cell.config.name
    overrides = _overrides_of(cell)
    return RunInfo(cell.id, name, number, overrides, git_sha=code.sha, git_dirty=code.dirty, snapshot=snapshot)


def _overrides_of(cell: Cell) -> list[str]:
    return [format_override(text) for text in cell.overrides if not text.startswith("sweep.")]


def write_invalid(run: AssignedRun) -> RunRecord:
    """Write the record of an invalid cell and return it."""
    if run.cell.decided is not None:
        content: Any = asdict(run.cell.decided)
    else:
        composed = without_hydra(run.composed)
        try:
            content = OmegaConf.to_container(composed, resolve=True)
        except OmegaConfBaseException:  # An interpolation of a missing key may be the error.
            content = OmegaConf.to_container(composed)
    record = invalid_record(run.info, content, run.cell.errors)
    record.predicted = run.cell.predicted
    run.cell.write_prediction(run.directory)
    record.write(run.directory)
    return record


@dataclass(frozen=True)
class ExistingRunRules:
    """What a launcher does about the runs that a sweep directory has already."""

    should_skip: Callable[[ExistingRun], bool]  # Reports an existing run that is kept, and returns whether it is.
    warn: Callable[[str], None]  # Prints a warning about existing runs that no cell matches.
    active: Collection[int] = ()  # Numbers of runs that have not ended. The warning leaves them out.


def assign_run_dirs(
    cells: Sequence[Cell],
    sweep_dir: Path,
    code: GitState,
    rules: ExistingRunRules,
    *,
    resume: bool,
    snapshot: str | None = None,
) -> Iterator[AssignedRun]:
    """Yield each cell to run with its number and directory, claimed at that moment, or those of its existing run."""
    existing = ExistingRuns.read(sweep_dir) if resume else ExistingRuns()
    infos = [make_run_info(cell, 0, code, snapshot) for cell in cells]
    matches = existing.match(infos)
    unfinished = [run for run in existing.unfinished(below=sweep_dir) if run.number not in rules.active]
    if (warning := unmatched_message(unfinished)) is not None:
        rules.warn(warning)
    first_free = 0
    for cell, info, known in zip(cells, infos, matches, strict=True):
        if known is not None and rules.should_skip(known):
            continue
        composed = cell.composed
        if known is None:
            directory_of = partial(run_dir_for, composed, sweep_dir)
            claimed = claim_run_dir(directory_of, first_free, sweep_dir, cell if resume else None)
            first_free = claimed.number + 1
        else:
            claimed = ClaimedDir(known.number, run_dir_for(composed, sweep_dir, known.number))
        info.number = claimed.number
        yield AssignedRun(cell, info, claimed.directory, composed)


def run_dir_for(composed: DictConfig, sweep_dir: Path, number: int) -> Path:
    """Return the directory of a cell as run ``number`` of a sweep, and set both in its hydra node.

    Raise ConfigError if it is not in the sweep: no command would find the run, and a stored one could write anywhere.
    """
    with open_dict(composed):
        composed.hydra.job.id = composed.hydra.job.num = number
        composed.hydra.sweep.dir = str(sweep_dir)
    chosen = str(composed.hydra.sweep.subdir)
    if os.path.isabs(chosen) or os.pardir in Path(os.path.normpath(chosen)).parts:
        raise ConfigError(
            f"hydra.sweep.subdir={chosen} is not inside of {sweep_dir}: choose a folder in it, or another "
            "hydra.sweep.dir"
        )
    return (sweep_dir / chosen).absolute()


class ClaimedDir(NamedTuple):
    """Number and directory of a run that no other command can get."""

    number: int
    directory: Path


def claim_run_dir(
    directory_of: Callable[[int], Path], first: int, sweep_dir: Path, resumed: Cell | None = None
) -> ClaimedDir:
    """Claim the first free run directory by creating its ``.hydra`` folder.

    Creating a folder is atomic, so two commands never share a run directory. A ``resumed`` cell takes one that an
    interrupted start has left without a run. ``sweep_dir`` changes the message only. Raise ConfigError if every number
    has the same directory (``hydra.run.dir``), and it is taken, or if the directory contains files of something else.
    """
    for number in itertools.count(first):
        directory = directory_of(number)
        directory.mkdir(parents=True, exist_ok=True)
        try:
            (directory / HYDRA).mkdir()
        except FileExistsError:
            if resumed is not None and not any((directory / name).exists() for name in (SPEC, RECORD)):
                return ClaimedDir(number, directory)  # No other command uses it, because the sweep is locked.
            if directory == directory_of(number + 1):
                raise ConfigError(_taken_message(directory, sweep_dir, resumed)) from None
            continue
        # The run would move files of something else to ``attempts/``.
        if found := [name for name in (*ATTEMPT_FILES, PREDICTED) if (directory / name).exists()]:
            (directory / HYDRA).rmdir()
            raise ConfigError(
                f"{directory} contains {join_first(found)}, which belong to no run, and a run writes files with these "
                "names: choose another directory"
            )
        return ClaimedDir(number, directory)
    raise AssertionError("unreachable")


def _taken_message(directory: Path, sweep_dir: Path, resumed: Cell | None) -> str:
    subdir = os.path.relpath(directory, sweep_dir)
    key, value = ("hydra.run.dir", directory) if subdir == "." else ("hydra.sweep.subdir", subdir)
    if resumed is not None:
        found = [run.overrides for run in ExistingRuns.read(directory).runs if run.directory == directory.absolute()]
        cause, hint = "the new overrides define a different run", "resume without them"
        if found == [_overrides_of(resumed)]:
            content = [f"the content of {join_first(paths)} or "] if (paths := _local_paths(resumed.config)) else []
            cause, hint = f"{''.join(content)}its configuration has changed since", "undo the change to continue it"
            if lost := _lost_paths(directory):
                cause, hint = f"{join_first(lost)} does not exist any more", "restore it to continue the run"
        resume = copyable_overrides(f"train.resume={directory}")
        more = (
            f". Add {resume} to start it from the last checkpoint of this run"
            if _has_checkpoint_for(resumed.config, directory)
            else ""
        )
        return (
            f"{directory} contains a single run ({key}), and {cause}: {hint}, or start the new run in another "
            f"directory{more}"
        )
    return (
        f"{key}={value} contains a run already: choose another directory, or resume that run with "
        f"{suggest_command('resume', sweep_dir.absolute())}"
    )


def _has_checkpoint_for(config: Config | None, directory: Path) -> bool:
    """Return whether a run has a checkpoint from which a training with another configuration can start."""
    if config is None or not any((directory / CHECKPOINTS).glob("step-*")):
        return False
    with suppress(OSError, ValueError):  # The spec is missing or damaged.
        spec = RunSpec.read(directory)
        return fits_checkpoint(config, spec.config, spec.run.id)
    return False


def _local_paths(config: Config | None, *, exist: bool = True) -> list[str]:
    """Return the files and folders that a configuration names, each with its key; or those that do not exist."""
    if config is None:
        return []
    keys = [key for key, spec in schema_fields() if info_of(spec).path]
    keys += ["model.name"] if names_source(config.model) else []
    named = [(key, get_value(config, key)) for key in keys]
    return [f"{key}={path}" for key, path in named if path and bool(os.path.exists(path) or glob.glob(path)) == exist]


def _lost_paths(directory: Path) -> list[str]:
    """Return the files and folders of a run that do not exist any more. Those of a record are absolute."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # The spec is missing or damaged.
        return [text for text in _local_paths(RunSpec.read(directory).config, exist=False) if "=/" in text]
    return []


@contextmanager
def locked_sweep_dir(master: DictConfig, cells: int) -> Iterator[Path]:
    """Create the directory of a sweep, and lock it during the block.

    It gets Hydra's ``multirun.yaml``, and the command line for ``distexp resume``. Those of a resumed sweep are kept.
    Raise ConfigError if links lead out of a foreign sweep, or if another command runs a sweep there.
    """
    typed = cast(list[str], OmegaConf.to_container(master.hydra.overrides.hydra))  # does not resolve ${...}
    chosen = any(text.startswith("hydra.sweep.dir=") for text in typed)
    subdir = cast(dict[str, str], OmegaConf.to_container(master.hydra.sweep))["subdir"]
    is_single = f"hydra.sweep.subdir={subdir}" == SINGLE_RUN
    if master.sweep.resume:
        check_files(Path(master.hydra.sweep.dir))
    sweep_dir = claim_sweep_dir(Path(master.hydra.sweep.dir), chosen_by_user=chosen, is_single=is_single)
    with texts.name_folder(sweep_dir), attempts.sweep_lock(sweep_dir):
        _refuse_other_kind(sweep_dir, is_single=is_single)
        if not (sweep_dir / MULTIRUN).exists():
            OmegaConf.save(master, sweep_dir / MULTIRUN)
        if not (sweep_dir / COMMAND).exists():
            command = {"command": master.command, "words": sys.argv[1:], "directory": os.getcwd(), "cells": cells}
            write_json(sweep_dir / COMMAND, command)
            remember_file(sweep_dir / COMMAND)
        yield sweep_dir


def _refuse_other_kind(sweep_dir: Path, *, is_single: bool) -> None:
    """Raise ConfigError for a single run in the directory of a sweep, and for any command in that of another's run.

    Both would have a run 0, and ``distexp resume`` would know one of the two commands.
    """
    key = "hydra.run.dir" if is_single else "hydra.sweep.dir"
    if not (sweep_dir / COMMAND).exists() and any((sweep_dir / name).exists() for name in (HYDRA, SPEC, RECORD)):
        above = next((folder for folder in sweep_dir.absolute().parents if (folder / COMMAND).is_file()), None)
        hint = f", or continue its sweep with {suggest_command('resume', above)}" if above else ""
        raise ConfigError(f"{key}={sweep_dir} is the directory of a run: choose another directory{hint}")
    stored = read_or_none(sweep_dir / COMMAND, "words")
    if not isinstance(stored, list) or is_single == (SINGLE_RUN in stored or (sweep_dir / HYDRA).exists()):
        return
    if is_single:
        raise ConfigError(
            f"{key}={sweep_dir} is the directory of a sweep: choose another directory, or add the run to the "
            f"sweep with {shell_quote(sweep_dir_override(sweep_dir))}"
        )
    raise ConfigError(f"{key}={sweep_dir} is the directory of a single run: choose another directory")


def claim_sweep_dir(wanted: Path, *, chosen_by_user: bool, is_single: bool) -> Path:
    """Create the directory of a sweep. If another command has just taken the default one, add a suffix."""
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        if chosen_by_user:
            wanted.mkdir(exist_ok=True)
            return wanted
    except FileNotFoundError:
        key = "hydra.run.dir" if is_single else "hydra.sweep.dir"
        raise ConfigError(f"{wanted} cannot be made: choose another directory with {key}=DIR") from None
    for attempt in itertools.count(1):
        candidate = wanted if attempt == 1 else wanted.with_name(f"{wanted.name}_{attempt}")
        with suppress(FileExistsError):
            candidate.mkdir()
            return candidate
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class GitState:
    """Commit of the code for the records, and whether it has uncommitted changes; None outside a checkout."""

    sha: str | None = None
    dirty: bool | None = None


def package_git_state() -> GitState:
    """Return the state of the checkout that this distexp is imported from."""
    return git_state(git_root(PACKAGE))


def git_root(folder: Path) -> Path | None:
    """Return the root of the git checkout that tracks a folder, or None."""
    top = run_git(folder, "rev-parse", "--show-toplevel")
    if top is None or not run_git(folder, "ls-files", "--", "."):
        return None
    return Path(top.strip())


def git_state(root: Path | None) -> GitState:
    """Return the state of a checkout. New files that git does not ignore count as changes."""
    if root is None:
        return GitState()
    sha = run_git(root, "rev-parse", "HEAD")
    return GitState(sha.strip() if sha else None, bool(run_git(root, "status", "--porcelain")))


def run_git(folder: Path, *arguments: str) -> str | None:
    """Return what a git command prints in a folder; None if it fails, or if git is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


# ``ledger.jsonl`` of a sweep directory: the Slurm job and the latest known state of each run.
#
# Lines are only added, under a lock, and only by commands on a login node. A job writes to its own run directory
# only, because lines from several nodes may tear on a network file system.


JOB = re.compile(r"[0-9]+(_[0-9]+)?")
"""A Slurm job as ARRAY_INDEX. Anything else could be an option of Slurm's commands."""


@dataclass(frozen=True)
class Entry:
    """State of one run at one time."""

    run: int
    id: str
    directory: str  # Directory of the run, relative to the sweep directory, so that the sweep can be moved.
    job: str | None  # Slurm job as ARRAY_INDEX.
    state: str  # ``submitted``, ``cancelled``, or the status of the record.
    unix_time_s: float = field(default_factory=time.time)


def append(sweep_dir: Path, entries: Iterable[Entry]) -> None:
    """Append entries. If the machine goes down, the last line may be torn; ``read`` leaves it out."""
    text = "".join(json.dumps(asdict(entry)) + "\n" for entry in entries)
    if not text:
        return
    with (sweep_dir / LEDGER).open("a+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            text = text if file.read(1) == b"\n" else "\n" + text
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def read(sweep_dir: Path) -> list[Entry]:
    """Read all entries, the oldest first, without those that no distexp writes; a sweep on one machine has none."""
    found = []
    for raw in files.read_entries(sweep_dir / LEDGER):
        try:
            entry = typed_values.parse_dataclass(Entry, raw)
        except (TypeError, ValueError):
            continue
        if _is_valid(sweep_dir, entry):
            found.append(entry)
    return found


def _is_valid(sweep_dir: Path, entry: Entry) -> bool:
    """Return whether an entry names a job of Slurm and a directory inside the sweep."""
    directory = PurePosixPath(entry.directory)
    if directory.is_absolute() or ".." in directory.parts:
        return False
    if entry.job is not None and JOB.fullmatch(entry.job) is None:
        return False
    return (sweep_dir / directory).resolve().is_relative_to(sweep_dir.resolve())


def latest(sweep_dir: Path) -> dict[int, Entry]:
    """Return the latest entry of each run, by its number."""
    return {entry.run: entry for entry in read(sweep_dir)}

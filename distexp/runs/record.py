"""Record of a run: ``record.json``, with its configuration, status, metrics and memory.

The names of the keys contain the units. A value that was not measured is null, never 0. Other tools rely on this
layout, so a change of a key's meaning raises SCHEMA_VERSION.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from distexp.config import Command, Config, ConfigError
from distexp.config.fields import describe, key
from distexp.config.overrides import suggest_command
from distexp.exceptions import printable
from distexp.runs.metrics import Metrics
from distexp.runs.number_ranges import number_errors
from distexp.runs.record_sections import Built, Environment, Predicted, RunError, RunInfo, StrategyTraits
from distexp.runs.run_dir import (
    CHOICE,
    COMMAND,
    NON_RUN_DIRS,
    OUTPUTS,
    PHASE_SETTINGS,
    RECORD,
    RESULT,
    SNAPSHOT_MARKER,
    SPEC,
    command_path,
)
from distexp.system.files import convert_texts, one_line, open_file, read_json, read_or_none, walk, write_json
from distexp.system.typed_values import device_errors, parse_dataclass, section_errors, texts_of

SCHEMA_VERSION = 2
"""Version of the format. A record of another version is refused. A new key does not raise it."""

MAX_SHOWN_ERRORS = 3

STATUSES = ("completed", "oom_gpu", "oom_host", "failed", "timeout", "killed", "preempted", "invalid")

FAILURES = frozenset({"failed", "timeout", "killed"})
"""Statuses that make the exit code of a sweep 1. Running out of memory is a result, not a failure."""

INVALID_ID = "invalid"
"""``run.id`` of all invalid runs. They have no complete configuration that could be hashed."""


@dataclass
class RunRecord:
    """Everything that is known about a run."""

    status: str = field(metadata=describe("Outcome of the run.", choices=STATUSES))
    run: RunInfo = field(metadata=describe("Identity of the run."))
    config: dict[str, Any] = field(metadata=describe("Resolved configuration."))
    error: RunError | None = key(None, "Error of a run that is not completed.")
    built: Built | None = key(None, "What was built.")
    environment: Environment | None = key(None, "Software and hardware.")
    metrics: Metrics = field(default_factory=Metrics, metadata=describe("Metrics of the training."))
    memory: dict[str, Any] = key(
        {"gpu": [], "torch": [], "cpu": [], "parts": []},
        "Memory, sampled on each node; `torch` is the allocator of each rank, `parts` its tensors.",
        parts={
            ".gpu[]": "GPU memory from NVML: `node`, `index`, `peak_mib`, `average_mib`, `mode_mib`, `phases`, ...; "
            "over the training steps alone `training_average_mib`, `training_mode_mib`. Peak, average and mode leave "
            "out the phases `compiling` and `search`, and what follows the start of `profile`. `job_peak_mib` is the "
            "peak of the run's own processes, null if NVML does not list them.",
            ".torch[]": "`rank`, `peak_allocated_mib`, `average_allocated_mib`, `states_mib` (allocated before an "
            "update), `peak_reserved_mib`, `alloc_retries`.",
            ".parts[]": "Tensors of each rank: `rank`, `parameters_mib`, `gradients_mib`, `optimizer_states_mib`, "
            "`activations_mib` (saved for the backward pass of a micro-batch), `phase` (`train`). With "
            "`train.profile_steps` on a GPU also the peaks of a step, with `phase` `forward`, `backward` and "
            "`optimizer`: the parts of `predicted.parts`, `other_mib`, their sum `allocated_mib`, `reserve_mib` "
            "(reserved and not allocated), `context_mib` (outside of torch's allocator) and `context_source` (NVML "
            "counted this `process`, or the whole `gpu`).",
            ".cpu[]": "PSS of all processes of the run: `node`, and the keys of `gpu[]` without `index`. Peak, "
            "average and mode leave out the phases `compiling`, `search`, `profile` and `done`.",
        },
    )
    utilization: dict[str, Any] = key(
        {"gpu": [], "cpu": []},
        "Utilization, sampled on each node.",
        parts={".gpu[]": "`node`, `index`, `average_pct`, `phases`.", ".cpu[]": "`node`, `average_pct`, `phases`."},
    )
    preflight: dict[str, Any] | None = key(
        None,
        "Communication bandwidth test before the training.",
        parts={
            ".backend": "`nccl` or `gloo`.",
            ".nodes": "Number of nodes.",
            ".hosts": "Number of machines. Fewer than nodes if a local run simulates nodes.",
            ".min_busbw_gbps": "Lowest accepted bus bandwidth, in GB/s.",
            ".measurements[]": "Bandwidth of each collective, size and group.",
            ".host_copies[]": "Bandwidth of copies between CPU and GPU, for each rank.",
            ".matrix_products[]": "`precision` and `tflops` of a large matrix product on each rank.",
            ".complaints": "Problems of the GPUs.",
        },
    )
    predicted: Predicted | None = key(None, "Memory as predicted before the run.")
    strategy: StrategyTraits | None = key(None, "What the strategy states for the report. Null: an invalid run.")
    schema_version: int = key(SCHEMA_VERSION, "Version of this format.")

    def __post_init__(self) -> None:
        if not isinstance(self.status, str) or self.status not in STATUSES:
            raise ValueError(f"status={self.status!r} is not one of {', '.join(STATUSES)}")

    def write(self, directory: Path) -> None:
        """Write ``directory/record.json`` atomically."""
        write_json(directory / RECORD, asdict(self))

    def write_result(self, directory: Path) -> None:
        """Write ``directory/result.json``: a record without memory traces, which the launcher completes."""
        write_json(directory / RESULT, asdict(self))

    @classmethod
    def read(cls, path: Path, repair: Callable[[dict[str, Any]], dict[str, Any]] = lambda raw: raw) -> RunRecord:
        """Read a record or a result. Raise ValueError if it is missing, torn, not a record, or of another schema.

        ``repair`` returns the content to read.
        """
        try:
            raw = read_json(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is not a JSON file: {error}") from None
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"{path} has schema_version={version!r}, and this version of distexp reads {SCHEMA_VERSION}: "
                "run it again, or read it with the distexp that wrote it"
            )
        if LINE_BREAKS.search(path.read_bytes()):
            section = raw.get("error")
            message = section.get("message") if isinstance(section, dict) else None
            raw = convert_texts(raw, one_line)
            if message is not None:  # It may have several lines.
                raw["error"]["message"] = message
        try:
            raw = repair(raw)
            errors = [
                *section_errors(Config, raw["config"], complete=raw["status"] != "invalid"),
                *device_errors(raw["memory"], "memory"),
                *device_errors(raw["utilization"], "utilization"),
                *number_errors(raw),
            ]
            if errors:
                raise ValueError(", ".join(errors[:MAX_SHOWN_ERRORS]))
            return parse_dataclass(cls, raw)
        except KeyError as error:
            raise ValueError(f"{path} is not a record of distexp: {error} is missing") from None
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a record of distexp: {error}") from None


LINE_BREAKS = re.compile(rb"\\[nrtu]|\xe2\x80[\xa8\xa9]")
"""What stands for a line break or a tab in a JSON file. Most records have none."""


class StoredRecord(NamedTuple):
    """A record, and the path of its file."""

    path: Path
    record: RunRecord


class FoundRecords(NamedTuple):
    """The readable records below some folders, and a message for each record that is not readable."""

    stored: list[StoredRecord]
    messages: list[str]

    @property
    def records(self) -> list[RunRecord]:
        """Return the records without their paths."""
        return [found.record for found in self.stored]


def read_records(*roots: Path) -> FoundRecords:
    """Read every record below some directories, in the order of their run numbers."""
    stored: list[StoredRecord] = []
    messages: list[str] = []
    for path in find_records(*roots):
        try:
            stored.append(StoredRecord(path, RunRecord.read(path)))
        except ValueError as error:
            messages.append(str(error))
    return FoundRecords(stored, messages)


def find_records(*roots: Path) -> Iterator[Path]:
    """Yield the records below some directories by their run numbers, without those in snapshots of the code."""
    for root in roots:
        folders = []
        for name, subfolders, files in walk(root):
            # walk enters only the subfolders that are left in this list.
            subfolders[:] = [sub for sub in subfolders if not os.path.exists(os.path.join(name, sub, SNAPSHOT_MARKER))]
            if RECORD in files:
                folders.append(Path(name))
        # As texts, 10 comes before 9.
        folders.sort(key=lambda path: (str(path.parent), int(path.name) if path.name.isdecimal() else -1, path.name))
        yield from (folder / RECORD for folder in folders)


def choose_newest_sweep(*, leave_out: Collection[Command] = ()) -> Path:
    """Return the newest sweep in ``multirun_outputs/``, or raise ConfigError; print which one it is to stderr."""
    others, files = [*leave_out, Command.VERIFY], []  # the runs of distexp verify have no records
    for folder, subfolders, names in walk(Path(OUTPUTS)):
        if COMMAND in names:
            subfolders.clear()  # A sweep contains no other sweep.
            files.append(Path(folder, COMMAND))
    files.sort(key=_modified, reverse=True)
    commands = [read_or_none(file, "command") for file in files]  # A damaged file is of none.
    newest = next((place for place, command in enumerate(commands) if command not in others), None)
    if newest is None:
        raise ConfigError(f"no sweep below {OUTPUTS}/ in {Path.cwd()}: give the directory of a sweep")
    sweep_dir = files[newest].parent
    kinds = [command for command in others if command in commands[:newest]]
    skipped = f" (later directories of {' and '.join(kinds)} do not count)" if kinds else ""
    print(f"newest sweep: {sweep_dir}{skipped}", file=sys.stderr)
    return sweep_dir


def describe_no_training(record: RunRecord) -> str:
    """Return what a run is that trains nothing for the user, and what to give instead; empty if it is a training."""
    command = record.config.get("command")
    if command == Command.CHOOSE:
        return f"is a search of distexp choose: run the command of its winner ({CHOICE}) with profile=true"
    if command == Command.PREFLIGHT:
        return "is a preflight: give the directory of a training with profile=true"
    return ""


def not_a_folder(path: Path) -> str:
    """Return why a path is not the directory of runs, with what to give instead."""
    return f"{path}: {'it is a file' if path.exists() else 'no such directory'}. Give that of a run or a sweep"


def not_a_sweep(directory: Path, missing: str) -> str:
    """Return why a directory is not a sweep, with the directory to give instead if it is inside or above one."""
    if not directory.is_dir():
        problem = "is a file" if directory.exists() else "does not exist"
        return f"{directory} {problem}: give the directory of a sweep"
    if missing != COMMAND and (directory / COMMAND).is_file():
        if read_or_none(directory / COMMAND, "command") == Command.VERIFY:
            status = suggest_command("status", directory)
            return f"{directory} belongs to distexp verify and has no runs: {status} shows its result, Ctrl-C ends it"
        return f"{directory} has no runs: {suggest_command('resume', directory)} starts them"
    for above in directory.absolute().parents:
        if (above / COMMAND).is_file():
            return f"{directory} is not a sweep but is inside one: give {above}"
    below = [*directory.glob(f"*/{COMMAND}"), *directory.glob(f"*/*/{COMMAND}")]
    example = f", such as {max(below, key=_modified).parent}" if below else ". 'distexp ls' lists the newest ones"
    return f"{directory} contains no {missing}: give the directory of a sweep{example}"


def no_readable_record(directories: Sequence[Path], reasons: Sequence[str] = ()) -> str:
    """Return why no record below some directories can be read, or which directory to give if there is no record."""
    start = f"no readable {RECORD} below {', '.join(map(str, directories))}"
    if reasons:
        others = f" ({len(reasons) - 1} others cannot be read either)" if len(reasons) > 1 else ""
        return f"{start}: {reasons[0]}{others}. Give the directory of another run or sweep"
    sweeps = list(Path(OUTPUTS).glob(f"*/*/{COMMAND}"))
    example = f", such as {max(sweeps, key=_modified).parent}" if sweeps else ""
    return f"{start}: give the directory of a run or a sweep{example}"


def _modified(path: Path) -> float:
    return path.stat().st_mtime


@dataclass(frozen=True)
class RunSpec:
    """The resolved configuration of a run, and its identity."""

    config: Config
    run: RunInfo

    @property
    def nodes(self) -> int:
        """Number of nodes, including simulated ones."""
        return self.config.cluster.nodes

    @property
    def workers_per_node(self) -> int:
        """Number of workers on each node, one per GPU."""
        workers = self.config.cluster.workers_per_node
        assert workers is not None, "resolve() decides the number of workers"
        return workers

    @property
    def world_size(self) -> int:
        """Number of workers on all nodes."""
        return self.config.cluster.world_size

    def write(self, directory: Path) -> None:
        """Write ``directory/spec.json`` atomically."""
        write_json(directory / SPEC, {"config": asdict(self.config), "run": asdict(self.run)})

    @classmethod
    def read(cls, directory: Path) -> RunSpec:
        """Read the ``spec.json`` of a run directory, or raise OSError, or ValueError if it is damaged."""
        try:
            with open_file(directory / SPEC) as file:
                raw = json.load(file)
            return cls(config=parse_config(raw["config"]), run=parse_dataclass(RunInfo, raw["run"]))
        except (KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise ValueError(f"{directory / SPEC} is damaged ({reason})") from error


def parse_config(values: Any) -> Config:
    """Return a resolved configuration as dataclasses. Raise ValueError or TypeError if it does not match the schema."""
    if errors := list(section_errors(Config, values, complete=True, known_only=True)):
        raise ValueError(", ".join(errors[:MAX_SHOWN_ERRORS]))
    return parse_dataclass(Config, values)


DONE = frozenset({"completed", "oom_gpu", "oom_host"})
"""Statuses of runs that are not run again. Running out of memory is a result: the same run would do it again."""


@dataclass(frozen=True)
class ExistingRun:
    """A run on disk, with the status of its record; None if it has no record."""

    number: int
    directory: Path
    id: str
    overrides: list[str]
    status: str | None


@dataclass
class ExistingRuns:
    """Runs of a sweep that no cell has been matched with."""

    runs: list[ExistingRun] = field(default_factory=list)

    @classmethod
    def read(cls, sweep_dir: Path) -> ExistingRuns:
        """Read every run directory below a sweep directory."""
        return cls(sorted(_read_runs(sweep_dir), key=lambda run: run.number))

    def match(self, cells: Sequence[RunInfo]) -> list[ExistingRun | None]:
        """Return the run of each cell, or None. Each run is matched once, and then removed from ``runs``.

        Only the id and the overrides of a cell count. Cells with the same id keep their own runs, for example
        ``cluster.cpus_per_worker=1,2``.
        """
        found: list[ExistingRun | None] = [None] * len(cells)
        rules: tuple[Callable[[ExistingRun, RunInfo], bool], ...] = (
            lambda run, cell: run.id == cell.id and run.overrides == cell.overrides,
            lambda run, cell: run.id == cell.id != INVALID_ID,  # Other overrides may describe the same training.
            lambda run, cell: run.id == INVALID_ID and run.overrides == cell.overrides,
        )
        for is_match in rules:
            for position, cell in enumerate(cells):
                if found[position] is None:
                    found[position] = next((run for run in self.runs if is_match(run, cell)), None)
                    self.runs = [run for run in self.runs if run is not found[position]]
        return found

    def unfinished(self, below: Path) -> list[ExistingRun]:
        """Return the unmatched runs that could be resumed, without one in the sweep directory ``below`` itself."""
        ended = {*DONE, "invalid"}
        return [run for run in self.runs if run.status not in ended and run.directory != below.absolute()]


def unmatched_message(runs: Sequence[ExistingRun]) -> str | None:
    """Return the warning about unfinished runs that no cell matches; None if there are none."""
    unreadable = f"was not resumed, because neither its {RECORD} nor its {SPEC} can be read"
    texts = [f"{run.directory} {unreadable}" for run in runs if not run.id]
    known = [f"{run.number} ({run.status or 'no record'})" for run in runs if run.id]
    if len(known) == 1:
        effect = "was not resumed: new overrides or changed data make it another run. Resume without them to continue."
        texts.append(f"run {known[0]} {effect}")
    elif known:
        effect = (
            "were not resumed: new overrides or changed data make them other runs. Resume without them to continue."
        )
        texts.append(f"runs {', '.join(known)} {effect}")
    return ". ".join(texts) or None


def _read_runs(sweep_dir: Path) -> Iterator[ExistingRun]:
    """Yield the runs below a folder. One of which no file can be read has the number of its folder."""
    for folder, subfolders, files in walk(sweep_dir):
        # walk enters only the subfolders that are left in this list.
        subfolders[:] = [name for name in subfolders if not name.startswith(NON_RUN_DIRS)]
        if (RECORD in files or SPEC in files) and PHASE_SETTINGS not in files:
            directory = Path(folder).absolute()
            run = _read_run(directory / RECORD) or _read_run(directory / SPEC)
            if run is None and directory.name.isdecimal():
                run = ExistingRun(int(directory.name), directory, id="", overrides=[], status=None)
            if run is not None:
                yield run


def config_dir_options(directory: Path) -> list[str]:
    """Return the option ``--config-dir FOLDER`` of the command that started a run or a sweep; empty if it had none."""
    words = texts_of({"words": read_or_none(command_path(directory), "words")}, "words")
    joined = "\n".join(map(printable, words))
    found = re.search(r"^(?:--config-dir|-cd)[=\n](.+)$", joined, re.MULTILINE)
    return ["--config-dir", found[1]] if found else []


def _read_run(path: Path) -> ExistingRun | None:
    """Return the run of a record or a spec; None if the file is missing or damaged."""
    try:
        raw = read_json(path)
        run, status = parse_dataclass(RunInfo, convert_texts(raw["run"], one_line)), raw.get("status")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return ExistingRun(run.number, path.parent, run.id, run.overrides, status if status in STATUSES else None)

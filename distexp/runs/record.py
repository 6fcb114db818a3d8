"""What a run leaves behind: ``record.json``, written whole or not at all.

Units are in the names of the keys; what was not measured is null, never 0. Other tools rely on this
layout, so a change of meaning raises SCHEMA_VERSION.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
RECORD = "record.json"
SPEC = "spec.json"
PREDICTIONS = "predictions.json"
SNAPSHOT_MARKER = ".complete.json"
"""Written last into a copy of the code; a folder that has it holds no run."""

STATUSES = ("completed", "oom_gpu", "oom_host", "failed", "timeout", "killed", "preempted", "invalid")
FAILURES = frozenset({"failed", "timeout", "killed"})
"""Statuses that make a sweep's exit code 1; running out of memory is a result, not a failure."""


@dataclass
class RunError:
    """Why a run did not complete."""

    type: str
    message: str
    phase: str | None = None  # setup, warmup, train, profile, eval, save
    rank: int | None = None
    errors: list[str] = field(default_factory=list)  # all errors of an invalid run; ``message`` joins them


@dataclass
class RunInfo:
    """Which run this is, and where and when it ran."""

    id: str
    name: str
    number: int
    overrides: list[str]
    started_at: str | None = None  # ISO 8601, UTC
    duration_s: float | None = None
    hosts: list[str] = field(default_factory=list)
    git_sha: str | None = None
    git_dirty: bool | None = None
    snapshot: str | None = None
    attempts: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Built:
    """What was really built, read off the live objects."""

    strategy: str
    engine: str
    wrapper: str
    world_size: int
    mesh: list[int]  # [replicate, shard]
    sharded_units: int
    zero_stage: int | None
    offload: str  # "none", or what lives on the CPU
    param_dtype: str
    compute_dtype: str
    optimizer: str
    parameters: int
    tokenizer: str | None = None


@dataclass
class Environment:
    """The software and the machine."""

    python: str
    torch: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    transformers: str | None = None
    deepspeed: str | None = None
    accelerate: str | None = None
    gpu_name: str | None = None
    gpu_total_mib: float | None = None
    cpu_count: int | None = None
    hostname: str | None = None
    variables: dict[str, str] = field(default_factory=dict)  # those that steer NCCL, gloo, CUDA and torch


@dataclass
class Metrics:
    """Figures of the training; those of speed leave the warm-up out unless they say otherwise."""

    train_loss: float | None = None  # mean over the steps, as the Trainer
    train_losses: list[float] = field(default_factory=list)  # per epoch
    eval_loss: float | None = None  # the last
    eval_losses: list[float] = field(default_factory=list)
    eval_runtime: float | None = None  # seconds, the last evaluation
    train_runtime: float | None = None  # seconds, evaluation and saving inside, as the Trainer
    train_samples_per_second: float | None = None  # training alone, after train.measure_after_step
    train_samples_per_second_overall: float | None = None  # evaluation inside, as the Trainer
    train_steps_per_second: float | None = None
    eval_samples_per_second: float | None = None
    steps_per_epoch: int | None = None
    total_steps: int | None = None
    tokens_per_second: float | None = None  # tokens without padding
    step_time_s: dict[str, float] | None = None  # p50, p90, max
    communication: dict[str, Any] | None = None  # see measure/profiler.py; train.profile_steps
    data_wait_s: float | None = None  # rank 0 waiting for its loader, all steps
    tflops_per_device: float | None = None
    mfu: float | None = None
    exact_match: float | None = None  # percent, as SQuAD's script gives it; train.score_answers
    f1: float | None = None  # likewise
    train_accuracies: list[float] = field(default_factory=list)  # from 0 to 1, per epoch
    eval_accuracies: list[float] = field(default_factory=list)
    eval_top5_accuracies: list[float] = field(default_factory=list)  # of fewer than five classes: all of them
    energy_j_per_sample: float | None = None


@dataclass
class RunRecord:
    """All that is known of a run."""

    status: str
    run: RunInfo
    config: dict[str, Any]
    error: RunError | None = None
    built: Built | None = None
    environment: Environment | None = None
    metrics: Metrics = field(default_factory=Metrics)
    memory: dict[str, Any] = field(default_factory=lambda: {"gpu": [], "torch": [], "cpu": []})
    utilization: dict[str, Any] = field(default_factory=lambda: {"gpu": [], "cpu": []})
    preflight: dict[str, Any] | None = None  # what was measured before the training, where it was
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status={self.status!r} is not one of {', '.join(STATUSES)}")

    def write(self, directory: Path) -> None:
        """Writes ``directory/record.json`` atomically, over an older one."""
        write_json(directory / RECORD, asdict(self))

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """Reads a record; ValueError where the file is torn, foreign or of another schema."""
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is not a JSON file: {error}") from None
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        if version != SCHEMA_VERSION:
            raise ValueError(f"{path} has schema_version {version!r}, this distexp reads {SCHEMA_VERSION}")
        try:
            return cls(
                status=raw["status"],
                run=_typed(RunInfo, raw["run"]),
                config=raw["config"],
                error=_typed(RunError, raw["error"]) if raw["error"] else None,
                built=_typed(Built, raw["built"]) if raw["built"] else None,
                environment=_typed(Environment, raw["environment"]) if raw["environment"] else None,
                metrics=_typed(Metrics, raw["metrics"]),
                memory=raw["memory"],
                utilization=raw["utilization"],
                preflight=raw.get("preflight"),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a record of distexp: {error}") from None


def _typed(kind: type[Any], raw: dict[str, Any]) -> Any:
    """The dataclass with the keys that it knows; a later minor addition is passed over."""
    known = {f.name for f in fields(kind)}
    return kind(**{key: value for key, value in raw.items() if key in known})


def write_json(path: Path, content: Any) -> None:
    """Writes JSON to a temporary sibling, flushes it to disk and renames it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w") as file:
            json.dump(finite(content), file, indent=2, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def finite(content: Any) -> Any:
    """The same content with null for numbers that JSON does not have: nan and the infinities."""
    if isinstance(content, float) and not math.isfinite(content):
        return None
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite(value) for value in content]
    return content


def find_records(*roots: Path) -> Iterator[Path]:
    """The records below some directories, at any depth, in the order of their run numbers."""
    for root in roots:
        found = [Path(where) / RECORD for where, names in _walk(root) if RECORD in names]
        yield from sorted(found, key=_by_number)


def _walk(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Folders and their files, the copies of code that a sweep on Slurm keeps left out."""
    for where, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not os.path.exists(os.path.join(where, name, SNAPSHOT_MARKER))]
        yield where, names


def _by_number(path: Path) -> tuple[str, int, str]:
    number = path.parent.name
    return str(path.parent.parent), int(number) if number.isdigit() else -1, number


def load_all(*roots: Path) -> tuple[list[tuple[Path, RunRecord]], list[str]]:
    """Every readable record with its path, and a sentence for each that is not."""
    records: list[tuple[Path, RunRecord]] = []
    skipped: list[str] = []
    for path in find_records(*roots):
        try:
            records.append((path, RunRecord.read(path)))
        except ValueError as error:
            skipped.append(str(error))
    return records, skipped

"""The profiled run that a forecast starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from distexp.config import ConfigError
from distexp.config.overrides import copyable_command
from distexp.forecast.communication import Forecast
from distexp.guard.sweep_files import is_own_file
from distexp.runs.predictions import measured_step_s
from distexp.runs.record import RunRecord, describe_no_training, not_a_sweep, read_records
from distexp.runs.run_dir import COMMAND, MICRO_BATCH, RECORD
from distexp.runs.step_files import MicroBatchSearch, read_step_model
from distexp.system.typed_values import number_of

MAX_LISTED_RUNS = 5  # most runs that a message lists


@dataclass(frozen=True)
class ProfiledRun:
    """A completed run with a model of its steps."""

    directory: Path
    record: RunRecord

    def setting(self, section: str, name: str) -> Any:
        """Return a value of the run's resolved configuration; None if the record lacks it."""
        values = self.record.config.get(section)
        return values.get(name) if isinstance(values, dict) else None

    @property
    def on_gpu(self) -> bool:
        """Return whether the run used GPUs."""
        return bool(self.setting("cluster", "device") == "cuda")

    @property
    def size(self) -> tuple[int, int]:
        """Return the number of nodes and of workers on each."""
        return int(self.setting("cluster", "nodes") or 1), int(self.setting("cluster", "workers_per_node") or 1)

    @property
    def workers(self) -> int:
        """Return the number of workers on all nodes."""
        nodes, workers_per_node = self.size
        return nodes * workers_per_node

    @cached_property
    def micro_batch_size(self) -> int | None:
        """Return the samples of a worker in a forward pass, also if the run has searched them; None if unknown."""
        size = self.setting("train", "micro_batch_size")
        if isinstance(size, int):
            return size
        search = MicroBatchSearch.read(self.directory / MICRO_BATCH)
        return search.chosen if search is not None else None

    @property
    def samples_per_row(self) -> float:
        """Return the samples of a row of a batch. A packed row has several."""
        metrics, micro_batch = self.record.metrics, self.micro_batch_size
        samples, steps = metrics.train_samples_per_second, metrics.train_steps_per_second
        accumulation = self.setting("train", "gradient_accumulation_steps")
        if not (self.setting("dataset", "packing") and samples and steps and accumulation and micro_batch):
            return 1.0
        return samples / steps / (micro_batch * int(accumulation) * self.workers)

    @property
    def command_path(self) -> Path:
        """Return the file with the command of the run's sweep. A single run may be a sweep itself."""
        own = self.directory / COMMAND
        return own if own.is_file() else self.directory.parent / COMMAND

    @property
    def is_own(self) -> bool:
        """Return whether this user has started the run. The overrides of other users are not trusted."""
        return is_own_file(self.command_path)


def find_profiled_run(directory: Path) -> ProfiledRun:
    """Return the only run below a directory that can be forecast. Raise ConfigError if there is none, or several."""
    if not directory.is_dir():
        raise ConfigError(not_a_sweep(directory, RECORD).replace("of a sweep", "of a run"))
    found = read_records(directory)
    runs = [ProfiledRun(path.parent, record) for path, record in found.stored]
    if not runs:
        reason = f" ({found.messages[0]})" if found.messages else ""
        raise ConfigError(f"{directory} contains no readable {RECORD}{reason}: give the directory of a profiled run")
    profiled = [run for run in runs if run.record.status == "completed" and read_step_model(run.directory) is not None]
    if not profiled:
        raise ConfigError(_not_profiled(directory, runs))
    if len(profiled) > 1:
        titles = [f"{directory} has {len(profiled)} profiled runs: give one of them:"]
        for run in profiled[:MAX_LISTED_RUNS]:
            overrides = " ".join(run.record.run.overrides).replace("'", "")
            titles.append(f"{run.directory} ({overrides})" if overrides else str(run.directory))
        more = [f"and {len(profiled) - MAX_LISTED_RUNS} more"] if len(profiled) > MAX_LISTED_RUNS else []
        raise ConfigError("\n  ".join([*titles, *more]))
    return profiled[0]


def _not_profiled(directory: Path, runs: Sequence[ProfiledRun]) -> str:
    """Return why no run can be forecast, and what to type."""
    run = next((run for run in runs if run.record.status == "completed"), None)
    if run is None:
        status = runs[0].record.status
        return f"{directory} has no profile, because the run is {status}: give a completed run with profile=true"
    if other := describe_no_training(run.record):
        return f"{directory} {other}"
    if note := (run.record.metrics.communication or {}).get("note"):  # A second run would have it too.
        return f"{directory} has no profile for a forecast: {note}"
    options = [text for text in run.record.run.overrides if not text.startswith(("profile=", "train.profile_steps="))]
    return f"{directory} has no profile for a forecast: run it with {copyable_command([*options, 'profile=true'])}"


def read_profiled_run(directory: Path) -> ProfiledRun:
    """Return the run of a directory. Raise ConfigError if its record cannot be read."""
    try:
        return ProfiledRun(directory, RunRecord.read(directory / RECORD))
    except ValueError as error:
        raise ConfigError(f"{error}: give the directory of a profiled run") from None


@dataclass(frozen=True)
class PowerModel:
    """The idle power of one GPU in W, and the energy of a micro-batch above it in J, from a profiled run.

    A GPU has its idle power for the whole step. The energy above it belongs to the computation. It is the same for
    each micro-batch on any number of GPUs. So waiting and communication cost the idle power only, a lower bound.
    """

    idle_w: float
    busy_j: float

    def j_per_step(self, forecast: Forecast) -> float:
        """Return the energy of all GPUs in a step."""
        target = forecast.target
        return target.workers * (self.idle_w * forecast.step_time_s + self.busy_j * target.micro_batches)

    def j_per_sample(self, forecast: Forecast) -> float:
        """Return the energy of all GPUs per sample."""
        return self.j_per_step(forecast) / forecast.target.samples_per_step


def read_power(run: ProfiledRun, samples_per_step: float, micro_batches: int) -> PowerModel | None:
    """Return the power of the GPUs of a run; None if it was not measured."""
    energy = run.record.metrics.energy or {}
    per_sample, idle_w = number_of(energy, "j_per_sample"), number_of(energy, "idle_w")
    step_s = measured_step_s(run.record)
    if not run.on_gpu or per_sample is None or idle_w is None or step_s is None:
        return None
    idle_of_gpu = idle_w / run.workers
    busy_of_step = per_sample * samples_per_step / run.workers - idle_of_gpu * step_s
    return PowerModel(idle_of_gpu, max(0.0, busy_of_step) / micro_batches)

"""The profiled run that a forecast starts from."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any

from distexp.config import ConfigError
from distexp.explain.explanation import profile_advice
from distexp.forecast.communication import Forecast, Target
from distexp.guard.config_files import is_own_file
from distexp.runs.predictions import measured_step_s
from distexp.runs.record import RunRecord, describe_no_training, not_a_sweep, read_records
from distexp.runs.run_dir import MICRO_BATCH, RECORD, STEP_MODEL, command_path
from distexp.runs.step_files import (
    COPIES,
    GATHERS,
    GROUP,
    REDUCTIONS,
    Collective,
    Item,
    MicroBatchSearch,
    StepModel,
    read_ranks,
    read_step_model,
)
from distexp.strategies.base import recorded_strategy
from distexp.strategies.communication import (
    SCALAR_BYTES,
    StepCommunication,
    element_count,
    is_gradient_reduction,
)
from distexp.strategies.parallel.checks import CONTEXT, EXPERT
from distexp.strategies.traits import Traits, common_values, setting
from distexp.system.typed_values import number_of

MAX_LISTED_RUNS = 5  # most runs that a message lists


@dataclass(frozen=True)
class ProfiledRun:
    """A completed run with a model of its steps."""

    directory: Path
    record: RunRecord

    def setting(self, section: str, name: str) -> Any:
        """Return a value of the run's resolved configuration; None if the record lacks it."""
        return setting(self.record.config, f"{section}.{name}")

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

    @property
    def group(self) -> int:
        """Return how many workers share a model (section ``parallel``)."""
        return int(common_values(self.record.config)["group"])

    @property
    def data_parallel(self) -> int:
        """Return how many workers, or groups with the same rows, have their own rows."""
        return self.workers // (self.group // int(self.setting("parallel", "expert") or 1))  # Experts cross rows.

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
        return samples / steps / (micro_batch * int(accumulation) * self.data_parallel)

    @property
    def command_path(self) -> Path:
        """Return the file with the command of the run's sweep. A single run may be a sweep itself."""
        return command_path(self.directory)

    def read_model(self) -> StepModel | None:
        """Return the step model; None if there is none. Raise ConfigError if it is impossible, or of another run."""
        hint = "profile the run again, or copy the file again from where the run was made"
        try:
            model = read_step_model(self.directory)
        except ValueError as error:
            raise ConfigError(f"{error}: {hint}") from None
        if model is not None and (model.nodes, model.workers) != (self.size[0], self.workers):
            raise ConfigError(
                f"{self.directory / STEP_MODEL} has nodes={model.nodes} and workers={model.workers}, but the run had "
                f"{self.size[0]} and {self.workers}: {hint}"
            )
        return model

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
    profiled, errors = [], []
    for run in (run for run in runs if run.record.status == "completed"):
        try:
            profiled += [run] if run.read_model() is not None else []
        except ConfigError as error:
            errors += error.errors
    if not profiled:
        raise ConfigError(errors or _not_profiled(directory, runs))
    if len(profiled) > 1:
        titles = [f"{directory} has {len(profiled)} profiled runs: give one of them:"]
        for run in profiled[:MAX_LISTED_RUNS]:
            overrides = " ".join(run.record.run.overrides)
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
    return f"{directory} has no profile for a forecast: {profile_advice(run.directory, run.record)}"


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


@dataclass(frozen=True)
class MeasuredStep:
    """The step of a profiled run."""

    model: StepModel
    communication: StepCommunication  # what its strategy states about its collectives
    median_s: float  # of its measured steps, which are not profiled
    deviation_s: float  # standard deviation of a step, from the 90th percentile of the measured steps
    own_waiting_s: float  # that rank 0, whose step is simulated, waits for other workers
    record: RunRecord

    def waiting_s(self, workers: int) -> float:
        """Return how long some workers wait for the slowest one, from the spread of the measured steps."""
        if workers == 1:
            return 0.0
        more = expected_maximum(workers) - expected_maximum(self.model.workers)
        return max(0.0, self.own_waiting_s + self.deviation_s * more)

    @property
    def target(self) -> Target:
        """Return the size of the run itself."""
        model = self.model
        samples = (self.record.metrics.train_samples_per_second or 0.0) * self.median_s
        return Target(model.nodes, model.workers // model.nodes, model.micro_batches, samples)


def expected_maximum(count: int) -> float:
    """Return the expected maximum of independent standard normal values (Blom, 1958)."""
    return 0.0 if count <= 1 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def read_measured_step(run_dir: Path, trusted: Sequence[str] = ()) -> MeasuredStep:
    """Return what a forecast needs of a run.

    Raise ConfigError if it was not profiled, its record cannot be read, or its collectives are not known.
    """
    try:
        record = RunRecord.read(run_dir / RECORD)
    except ValueError as error:
        raise ConfigError(f"{error}: name the directory of a finished run") from error
    model = ProfiledRun(run_dir, record).read_model()
    times = record.metrics.step_time_s or {}
    median_s, p90_s = number_of(times, "p50"), number_of(times, "p90")
    if model is None or not median_s:
        raise ConfigError(f"{run_dir} has no profiled step to forecast from: run it again with profile=true")
    deviation = max(0.0, (p90_s or median_s) - median_s) / NormalDist().inv_cdf(0.9)
    strategy = recorded_strategy(record.config, trusted) or Traits()
    if model.workers == 1 and not strategy.communication(record.config).is_planned:
        raise ConfigError(
            f"{run_dir} was profiled on one worker, so the collectives of "
            f"strategy={setting(record.config, 'strategy.name')} are not known: profile it on two workers"
        )
    communication = strategy.run_communication(record.config, record.built, run_dir)
    if problem := _unknown_groups(model, record, communication):
        raise ConfigError(f"{run_dir} {problem}")
    known = _with_groups(model.items, communication)
    items = assign_waits(fill_sizes(known, model, communication), communication, on_gpu=model.on_gpu)
    # The worker of a pipeline waits in each step, by its schedule. This wait is a part of its passes.
    waits = model.workers > 1 and communication.pipeline == 1
    waiting = _own_waiting(record, median_s) if waits else 0.0
    return MeasuredStep(replace(model, items=items), communication, median_s, deviation, waiting, record)


def _unknown_groups(model: StepModel, record: RunRecord, communication: StepCommunication) -> str:
    """Return why the collectives in a group and those between groups cannot be distinguished; empty if they can."""
    group, has_copies = communication.group, any(getattr(item, "axis", "") == COPIES for item in model.items)
    if group == model.workers and communication.cuts_weights and communication.pipeline == 1 and not has_copies:
        return (
            "was profiled by an earlier version, which did not keep the sizes of a worker's weights: profile it again"
        )
    if communication.pipeline > 1 and (group > communication.pipeline or communication.shards_optimizer):
        return (
            "has a pipeline with sharded states or shared matrices, whose collectives have no model: profile it with "
            "strategy=ddp parallel.tensor=1"
        )
    for key in (CONTEXT, EXPERT):
        if communication.cuts_weights and (setting(record.config, key) or 1) > 1:
            return f"shares matrices too, and the collectives of both look alike: profile it with {key}=1"
    if communication.cuts_weights and communication.mesh(2, nodes=2)[0] > 1:
        return "has replicas of a model in parts, whose collectives have no model: profile it with strategy=ddp"
    if group in (1, model.workers) or setting(record.config, CONTEXT) == group:
        return ""
    return (
        f"was profiled on {model.workers} workers in groups of {group} that share a model. The collectives in a group "
        f"and between groups look alike: profile one group, with cluster.nodes=1 cluster.workers_per_node={group}"
    )


def _with_groups(items: Sequence[Item], communication: StepCommunication) -> tuple[Item, ...]:
    """Return the items with the axis of the collectives between workers that share a model.

    Without those of a pipeline: their times contain the wait for other stages, which follows from the schedule.
    """
    found = []
    for item in items:
        is_of_group = isinstance(item, Collective) and communication.is_of_group(item)
        if not is_of_group or communication.pipeline == 1:
            found.append(replace(item, axis=GROUP) if isinstance(item, Collective) and is_of_group else item)
    return tuple(found)


def _own_waiting(record: RunRecord, median_s: float) -> float:
    """Return the wait of rank 0 for other workers in the profiled step; at most half of a step.

    The GPU also waits if the CPU is ahead of those of the other workers. The step is not longer for this reason: it is
    at least as long as the CPU works.
    """
    step = next((step for step in read_ranks(record) if step.rank == 0), None)
    if step is None:
        return 0.0
    idle_share = 1.0 if step.cpu_busy_share is None else max(0.0, 1 - step.cpu_busy_share)
    return min(step.time_ms("waiting") / 1000, idle_share * median_s, median_s / 2)


def assign_waits(items: Sequence[Item], communication: StepCommunication, *, on_gpu: bool) -> tuple[Item, ...]:
    """Return the items with the process group of each collective and what waits for it, as the strategy does it."""

    def assigned(item: Item) -> Item:
        if not isinstance(item, Collective) or item.axis == GROUP:
            return item
        found = communication.with_waits(item, on_gpu=on_gpu)
        return replace(found, axis=COPIES) if item.axis == COPIES else found

    return tuple(map(assigned, items))


def fill_sizes(items: Sequence[Item], model: StepModel, communication: StepCommunication) -> tuple[Item, ...]:
    """Return the items of several workers with sizes that the trace does not have, as with gloo.

    The reductions of a backward pass send all gradients, in parts that the strategy states. Gathers send all weights,
    in equal parts. Other all-reduces sum a number.
    """

    def sharing(item: Collective) -> tuple[str, str, int]:  # what the collectives that share a size have in common
        kind = "reduction" if item.kind in REDUCTIONS else "gather" if item.kind in GATHERS else item.kind
        return kind, item.phase, item.micro_batch

    unknown = {
        position: item
        for position, item in enumerate(items)
        if isinstance(item, Collective) and item.bytes is None and item.axis != GROUP
    }
    counts = Counter(map(sharing, unknown.values()))
    seen: Counter[tuple[str, str, int]] = Counter()
    found: list[Item] = list(items)
    for position, item in unknown.items():
        key, size = sharing(item), SCALAR_BYTES
        if is_gradient_reduction(item):
            size = communication.reduction_sizes(model, counts[key])[seen[key]]
        elif item.kind in GATHERS:
            size = element_count(model) * communication.weight_bytes // counts[key]
        seen[key] += 1
        found[position] = replace(item, bytes=size)
    return tuple(found)

"""The sizes of a forecast: each with its forecast, or with the reason why it has none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from distexp.compose.composition import Cell
from distexp.config import Config, ConfigError, ForecastConfig
from distexp.config.overrides import check_cell_count, parse, values_of
from distexp.forecast.communication import Forecast, Target
from distexp.forecast.profiled_run import PowerModel, ProfiledRun, read_power
from distexp.forecast.steps import forecast_steps
from distexp.preflight.machine import load_machine
from distexp.resolve.scaling_rules import OTHER_MICRO_BATCH
from distexp.runs import predictions, texts
from distexp.runs.record import read_records
from distexp.runs.record_sections import Predicted
from distexp.strategies.base import load_strategy
from distexp.system.cgroups import visible_gpus


def forecast_sizes(
    run: ProfiledRun, cells: Sequence[Cell], options: ForecastConfig, earlier: Sequence[predictions.ForecastError]
) -> list[SizeRow]:
    """Return the forecast of each cell. Errors of earlier forecasts on this machine widen the intervals."""
    rows = [_make_row(run, cell) for cell in cells]
    targets = [_target(run, row.cell.config) for row in rows if not row.error and row.cell.config is not None]
    steps = int(run.setting("train", "gradient_accumulation_steps") or 1)
    samples = (run.micro_batch_size or 1) * steps * run.data_parallel * run.samples_per_row
    own = Target(*run.size, steps, samples)
    machine = load_machine(run.directory, options) if targets else None
    trusted = [package for cell in cells if cell.config is not None for package in cell.config.trusted_packages]
    forecasts = forecast_steps(run.directory, [own, *targets], machine, trusted) if targets else []
    widened = iter([_widened(run, forecast, earlier) for forecast in forecasts[1:]])
    power = read_power(run, samples, steps)
    found = [row if row.error else replace(row, forecast=next(widened), power=power) for row in rows]
    baseline = _baseline(forecasts[:1], [row.forecast for row in found if row.forecast])
    return [replace(row, baseline=baseline, profiled_workers=run.workers) for row in found]


def _make_row(run: ProfiledRun, cell: Cell) -> SizeRow:
    cluster = (cell.config or cell.decided or cell.composed).cluster
    error = texts.join_errors(cell.errors).replace(OTHER_MICRO_BATCH, "") or _other_steps(run, cell.config)
    return SizeRow((int(cluster.nodes), int(cluster.workers_per_node or 1)), cell, error=error)


def _other_steps(run: ProfiledRun, config: Config | None) -> str:
    """Return why the micro-batches of a size are not those of the profile; empty if they are."""
    if config is None:
        return ""
    pairs = {
        "train.micro_batch_size": (config.train.micro_batch_size, run.micro_batch_size),
        "model.num_layers": (config.model.num_layers, run.setting("model", "num_layers")),
    }
    changed = ", ".join(f"{key}={new} instead of {old}" for key, (new, old) in pairs.items() if new != old)
    return changed and f"{changed} (scaling={config.scaling.name}): not forecast, profile a run with these values"


def _target(run: ProfiledRun, config: Config) -> Target:
    cluster, steps = config.cluster, config.train.gradient_accumulation_steps
    samples = config.train.micro_batch * steps * config.data_parallel * run.samples_per_row
    return Target(cluster.nodes, cluster.workers_per_node or 1, steps, samples)


def _widened(run: ProfiledRun, forecast: Forecast, earlier: Sequence[predictions.ForecastError]) -> Forecast:
    """Return a forecast whose interval is at least as wide as earlier errors of other forecasts were."""
    nodes, workers_per_node = forecast.target.nodes, forecast.target.workers_per_node
    if (nodes, workers_per_node) == run.size:  # It is measured, so no earlier error is about it.
        return forecast
    # A forecast's own error must not explain itself.
    own = predictions.subject_of(run.record, nodes, workers_per_node)
    factor = 1 + predictions.largest_expected([error for error in earlier if error.subject != own])
    low, high = forecast.step_time_s * (1 / factor), forecast.step_time_s * factor
    return replace(forecast, low_s=min(forecast.low_s, low), high_s=max(forecast.high_s, high))


def _baseline(own: Sequence[Forecast], rows: Sequence[Forecast]) -> Baseline | None:
    """Return the fewest workers of all rows, and of the profiled run if its batch is as theirs."""

    def same_batch(one: Target, other: Target) -> bool:
        same_of_worker = one.micro_batches == other.micro_batches
        return same_of_worker or math.isclose(one.samples_per_step, other.samples_per_step)

    comparable = [forecast for forecast in own if all(same_batch(forecast.target, row.target) for row in rows)]
    first = min([*rows, *comparable], key=lambda each: (each.target.workers, each.target.nodes), default=None)
    if first is None:
        return None
    return Baseline((first.target.nodes, first.target.workers_per_node), first.samples_per_second)


MIN_BOTTLENECK_SHARE = 0.005  # A smaller part of the step is not named


@dataclass(frozen=True)
class Baseline:
    """The fewest workers: their speed per worker is the ideal one."""

    size: Size
    samples_per_second: float

    def efficiency(self, workers: int, samples_per_second: float) -> float:
        """Return ideal time / real time."""
        return samples_per_second / workers / (self.samples_per_second / math.prod(self.size))


@dataclass(frozen=True)
class SizeRow:
    """A size with its forecast, or the reason why it has none, and everything that is printed for it."""

    size: Size
    cell: Cell  # the composed configuration
    forecast: Forecast | None = None  # None if there is an error
    error: str = ""  # why there is no forecast
    baseline: Baseline | None = None  # what the efficiency is relative to
    memory: Predicted | None = None
    memory_error: str = ""  # why the memory is unknown
    power: PowerModel | None = None
    measured: predictions.ForecastError | None = None  # a measured run of this size
    profiled_workers: int | None = None

    @property
    def workers(self) -> int:
        """Return the number of workers on all nodes."""
        return math.prod(self.size)

    @property
    def samples_per_second(self) -> float | None:
        """Return the throughput over all workers."""
        return None if self.forecast is None else self.forecast.samples_per_second

    @property
    def times_the_measured(self) -> float | None:
        """Return the workers relative to those of the profiled run."""
        return self.workers / self.profiled_workers if self.profiled_workers else None

    @property
    def efficiency(self) -> float | None:
        """Return ideal time / real time."""
        if self.baseline is None or self.samples_per_second is None:
            return None
        return self.baseline.efficiency(self.workers, self.samples_per_second)

    @property
    def efficiency_interval(self) -> tuple[float, float] | None:
        """Return both ends of the interval of the efficiency.

        The upper end is capped, unless workers share the optimizer states: then they have less work at larger sizes.
        """
        if self.forecast is None or self.baseline is None:
            return None
        samples, ends = self.forecast.target.samples_per_step, (self.forecast.high_s, self.forecast.low_s)
        low, high = (self.baseline.efficiency(self.workers, samples / step_s) for step_s in ends)
        config = self.cell.config
        has_constant_work = config is not None and load_strategy(config).keeps_states_whole(config) is True
        is_limited = self.size == self.baseline.size or has_constant_work
        return low, predictions.cap_efficiency(high, self.efficiency or 0.0) if is_limited else high

    def share(self, part: str) -> float | None:
        """Return a part of the step as a fraction; None if it is unknown."""
        if self.forecast is None or part not in self.forecast.parts:
            return None
        return self.forecast.parts[part] / self.forecast.step_time_s

    @property
    def bottleneck(self) -> tuple[str, float] | None:
        """Return the largest part of the step besides the computation, with its fraction; None if it is tiny."""
        others = {name: s for name, s in (self.forecast.parts if self.forecast else {}).items() if name != "compute"}
        name = max(others, key=others.__getitem__, default="")
        share = self.share(name) or 0.0
        return (name, share) if share >= MIN_BOTTLENECK_SHARE else None

    @property
    def j_per_sample(self) -> float | None:
        """Return the energy of all GPUs per sample."""
        return self.power.j_per_sample(self.forecast) if self.power and self.forecast else None

    @property
    def price(self) -> float | None:
        """Return the price of a million samples; None on CPUs, whose runs have no GPU-hours, or without a price."""
        cluster = self.cell.config.cluster if self.cell.config is not None else None
        if self.forecast is None or cluster is None or cluster.device == "cpu" or cluster.price_per_gpu_hour is None:
            return None
        gpu_hours_per_sample = self.workers * self.forecast.step_time_s / 3600 / self.forecast.target.samples_per_step
        return 1e6 * gpu_hours_per_sample * cluster.price_per_gpu_hour


def add_measured(
    run: ProfiledRun, rows: Sequence[SizeRow], stored: Sequence[predictions.StoredForecast]
) -> list[SizeRow]:
    """Return the rows with the measured runs of the same training, and keep their errors."""
    size = ("nodes", "workers_per_node")
    own = [run.setting("cluster", name) for name in size]
    records = {
        record.run.id: record for record in read_records(run.command_path.parent).records
        if record.status == "completed" and [(record.config.get("cluster") or {}).get(name) for name in size] != own
    }  # fmt: skip
    forecasts = {(forecast.nodes, forecast.workers_per_node): forecast for forecast in stored}

    def measured(row: SizeRow) -> predictions.ForecastError | None:
        forecast, record = forecasts.get(row.size), records.get(row.cell.id)
        error = predictions.compare_with_run(run.record, forecast, record) if forecast and record else None
        if forecast and record and error:
            predictions.store_error(run.record, forecast, record, error)
        return error

    return [replace(row, measured=measured(row)) for row in rows]


NODES, WORKERS_PER_NODE = "cluster.nodes", "cluster.workers_per_node"
SIZE_KEYS = (NODES, WORKERS_PER_NODE)

MAX_WORKERS = 4096  # most workers of a forecast
DEFAULT_WORKERS = 64  # most workers that are forecast if no size is typed
USUAL_GPUS = 8  # GPUs of a node, if nothing is known about the nodes

Size = tuple[int, int]  # number of nodes, and workers of each node


def choose_sizes(run: ProfiledRun, typed: Sequence[str]) -> list[Size]:
    """Return the sizes to forecast, in the order of the command line. Overrides of other keys are ignored.

    Raise ConfigError if a size is not a positive whole number, or too large.
    """
    values: dict[str, list[Any]] = {}
    parsed = parse(typed)
    check_cell_count(override for override in parsed if override.get_key_element().lstrip("+") in SIZE_KEYS)
    for override in parsed:
        key = override.get_key_element().lstrip("+")
        if key in SIZE_KEYS:
            listed = (item if isinstance(item, list) else [item] for item in values_of(override))
            values[key] = [each for items in listed for each in items]
            for value in values[key]:
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    raise ConfigError(f"{key}={value} must be a whole number from 1: write {key}=1,2,4")
    if not values:
        return [size for size in default_sizes(_workers_of_node(run)) if math.prod(size) % run.group == 0]
    nodes, workers = run.size
    sizes = list(dict.fromkeys(product(values.get(NODES, [nodes]), values.get(WORKERS_PER_NODE, [workers]))))
    for count, per_node in sizes:
        if count * per_node > MAX_WORKERS:
            raise ConfigError(
                f"{NODES}={count} x {WORKERS_PER_NODE}={per_node} makes {count * per_node:,} workers, but a forecast "
                f"has at most {MAX_WORKERS:,}: lower one of them"
            )
    return sizes


def default_sizes(workers_of_node: int) -> list[Size]:
    """Return powers of two up to 64 workers: of a node first, then of full nodes."""
    powers = [2**exponent for exponent in range(DEFAULT_WORKERS.bit_length())]
    in_node = [(1, count) for count in powers if count < workers_of_node and count <= DEFAULT_WORKERS]
    full = [(nodes, workers_of_node) for nodes in powers if nodes * workers_of_node <= DEFAULT_WORKERS]
    return in_node + full


def _workers_of_node(run: ProfiledRun) -> int:
    """Return how many workers a node has room for."""
    _, workers = run.size
    if not run.on_gpu:
        environment = run.record.environment
        threads = run.setting("cluster", "cpus_per_worker") or 1
        return max(workers, ((environment.cpu_count if environment else None) or 1) // threads)
    if gpus := run.setting("cluster", "gpus_per_node"):
        return max(workers, int(gpus))
    known = max(workers, len(visible_gpus()))
    return known if known > 1 else USUAL_GPUS


def as_cell(size: Size) -> list[str]:
    """Return the overrides of a size."""
    return [f"{key}={value}" for key, value in zip(SIZE_KEYS, size, strict=True)]

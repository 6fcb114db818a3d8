"""The measured step of a profiled run, and what else a forecast needs of its record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

from distexp.config import ConfigError
from distexp.forecast.communication import Target
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import RECORD
from distexp.runs.step_files import Collective, Item, StepModel, read_ranks, read_step_model
from distexp.strategies.base import recorded_strategy
from distexp.strategies.communication import (
    GATHERS,
    REDUCTIONS,
    SCALAR_BYTES,
    StepCommunication,
    element_count,
    is_gradient_reduction,
)
from distexp.strategies.traits import Traits, setting
from distexp.system.typed_values import number_of

P90 = NormalDist().inv_cdf(0.9)


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
    model = read_step_model(run_dir)
    times = record.metrics.step_time_s or {}
    median_s, p90_s = number_of(times, "p50"), number_of(times, "p90")
    if model is None or not median_s:
        raise ConfigError(f"{run_dir} has no profiled step to forecast from: run it again with profile=true")
    deviation = max(0.0, (p90_s or median_s) - median_s) / P90
    strategy = recorded_strategy(record.config, trusted) or Traits()
    if model.workers == 1 and not strategy.communication(record.config).is_planned:
        raise ConfigError(
            f"{run_dir} was profiled on one worker, so the collectives of "
            f"strategy={setting(record.config, 'strategy.name')} are not known: profile it on two workers"
        )
    communication = strategy.run_communication(record.config, record.built, run_dir)
    items = assign_waits(fill_sizes(model.items, model, communication), communication, on_gpu=model.on_gpu)
    waiting = _own_waiting(record, median_s) if model.workers > 1 else 0.0
    return MeasuredStep(replace(model, items=items), communication, median_s, deviation, waiting, record)


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
    return tuple(
        communication.with_waits(item, on_gpu=on_gpu) if isinstance(item, Collective) else item for item in items
    )


def fill_sizes(items: Sequence[Item], model: StepModel, communication: StepCommunication) -> tuple[Item, ...]:
    """Return the items of several workers with sizes that the trace does not have, as with gloo.

    The reductions of a backward pass send all gradients, in parts that the strategy states. Gathers send all weights,
    in equal parts. Other all-reduces sum a number.
    """

    def sharing(item: Collective) -> tuple[str, str, int]:  # what the collectives that share a size have in common
        kind = "reduction" if item.kind in REDUCTIONS else "gather" if item.kind in GATHERS else item.kind
        return kind, item.phase, item.micro_batch

    counts = Counter(sharing(item) for item in items if isinstance(item, Collective) and item.bytes is None)
    seen: Counter[tuple[str, str, int]] = Counter()
    found: list[Item] = list(items)
    for position, item in enumerate(items):
        if isinstance(item, Collective) and item.bytes is None:
            key, size = sharing(item), SCALAR_BYTES
            if is_gradient_reduction(item):
                size = communication.reduction_sizes(model, counts[key])[seen[key]]
            elif item.kind in GATHERS:
                size = element_count(model) * communication.weight_bytes // counts[key]
            seen[key] += 1
            found[position] = replace(item, bytes=size)
    return tuple(found)

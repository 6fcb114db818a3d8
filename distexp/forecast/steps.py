"""The forecast of the step time of a profiled run with other numbers of workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from distexp.config import ConfigError
from distexp.forecast.calibration import Calibration, calibrate
from distexp.forecast.collectives import MEASURED, MODEL, SCALED, collective_time
from distexp.forecast.communication import add_replication, plan_communication
from distexp.forecast.machine import MachineCurves, machine_of
from distexp.forecast.micro_batches import with_micro_batches
from distexp.forecast.observed import assign_waits, fill_sizes
from distexp.forecast.settings import CommunicationSettings
from distexp.forecast.simulate import SimulatedStep, simulate
from distexp.forecast.target import Forecast, Target
from distexp.runs.checked_values import number_of
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import RECORD
from distexp.runs.step_model import Collective, Item, StepModel, read_step_model

P90 = NormalDist().inv_cdf(0.9)

UNCERTAINTY = {MEASURED: 0.15, SCALED: 0.3, MODEL: 0.6}
"""Relative error of the exposed communication that the interval assumes, by the source of its duration."""
HIDDEN_UNCERTAINTY = 0.15
"""Fraction of the hidden communication by which a step may be longer: its kernels share the device with others."""
BASE_UNCERTAINTY = 0.03
"""Relative error of the interval at the profiled size, from run to run."""
DOUBLING_UNCERTAINTY = 0.01
"""Relative error that each doubling of the workers adds."""


@dataclass(frozen=True)
class ProfiledRun:
    """A run with a step model.

    Attributes:
        model: The profiled step.
        settings: Settings of its communication.
        median_s: Median of its measured steps, which are not profiled.
        deviation_s: Standard deviation of a step, from the 90th percentile of its measured steps.
        own_waiting_s: Time that its workers wait for each other.
        record: Its record.
    """

    model: StepModel
    settings: CommunicationSettings
    median_s: float
    deviation_s: float
    own_waiting_s: float
    record: RunRecord

    def waiting_s(self, workers: int) -> float:
        """Return how long some workers wait for the slowest one, from the spread of the measured steps."""
        if workers == self.model.workers:
            return self.own_waiting_s
        if self.model.workers == 1:
            return self.deviation_s * expected_maximum(workers)
        return self.own_waiting_s * expected_maximum(workers) / expected_maximum(self.model.workers)

    @property
    def target(self) -> Target:
        """Return the size of the run itself."""
        model = self.model
        metrics = self.record.metrics
        samples = (metrics.train_samples_per_second or 0.0) * self.median_s
        return Target(model.nodes, model.workers // model.nodes, model.micro_batches, samples)


def forecast_steps(
    run_dir: Path,
    targets: Sequence[Target],
    machine: MachineCurves | None = None,
    config: Mapping[str, Any] | None = None,
) -> list[Forecast]:
    """Return the forecast of the step time of each target.

    The profiled run's own size gives its own measured median.

    Args:
        run_dir: Directory of a run that was profiled (``profile=true``).
        targets: Sizes to forecast.
        machine: Curves and links. None: those that preflights stored for the type of device of the run.
        config: Resolved configuration of the targets, for their strategy. None: that of the run.

    Raises:
        ConfigError: The run was not profiled, or its record cannot be read.
    """
    run = read_profiled_run(run_dir)
    machine = machine or machine_of(run.record.environment)
    settings = run.settings if config is None else CommunicationSettings.of(config)
    calibration = calibrate(run.model.items, run.model, run.settings, run.median_s - run.own_waiting_s)
    return [_forecast(run, settings, target, machine, calibration) for target in targets]


def read_profiled_run(run_dir: Path) -> ProfiledRun:
    """Return what a forecast needs of a run.

    Raises:
        ConfigError: The run was not profiled, or its record cannot be read.
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
    stage = record.built.zero_stage if record.built else None
    deviation = max(0.0, (p90_s or median_s) - median_s) / P90
    settings = CommunicationSettings.of(record.config, stage)
    items = model.items if model.workers == 1 else fill_sizes(model.items, model, settings)
    model = replace(model, items=assign_waits(items, settings, on_gpu=model.on_gpu))
    return ProfiledRun(model, settings, median_s, deviation, _own_waiting(record, median_s), record)


def _own_waiting(record: RunRecord, median_s: float) -> float:
    """Return the wait for other workers in the profiled step, as a mean over them; at most half of a step."""
    entries = [entry for entry in record.metrics.step_breakdown or () if isinstance(entry, dict)]
    waits = [number_of(entry, "waiting_ms") or 0.0 for entry in entries]
    return min(sum(waits) / len(waits) / 1000, median_s / 2) if waits else 0.0


def target_items(run: ProfiledRun, settings: CommunicationSettings, target: Target) -> tuple[Item, ...]:
    """Return the segments and collectives of a step of a target."""
    model = run.model
    items = with_micro_batches(model.items, model.micro_batches, target.micro_batches, settings)
    if model.workers == 1:
        items = plan_communication(items, model, settings, micro_batches=target.micro_batches)
    return assign_waits(add_replication(items, settings, target), settings, on_gpu=model.on_gpu)


def _forecast(
    run: ProfiledRun,
    settings: CommunicationSettings,
    target: Target,
    machine: MachineCurves,
    calibration: Calibration,
) -> Forecast:
    items = target_items(run, settings, target)
    times = [_duration(item, run, settings, target, machine) for item in items]
    durations = [seconds for seconds, _ in times]
    step = simulate(items, durations, on_gpu=run.model.on_gpu, scales=calibration.scales)
    other = calibration.other_s * target.micro_batches / run.model.micro_batches
    waiting = run.waiting_s(target.workers) * math.sqrt(step.step_s / run.median_s)
    seconds = max(step.step_s + other + waiting, 1e-9)
    parts = {
        "compute": step.compute_s,
        "exposed_communication": step.exposed_s,
        "launch": step.launch_s,
        "waiting": waiting,
        "other": other,
    }
    sources = {source for (duration, source) in times if duration > 0}
    low, high = _interval(seconds, step, sources, run, target)
    beyond = _beyond(run, target, sources)
    notes = _notes(sources, items)
    return Forecast(target, seconds, low, high, parts, step.hidden_s, beyond=beyond, notes=notes)


def _duration(
    item: Item, run: ProfiledRun, settings: CommunicationSettings, target: Target, machine: MachineCurves
) -> tuple[float, str]:
    """Return the seconds of a collective in a target, and their source.

    An observed collective is scaled by the ratio of the two sizes on this machine.
    """
    if not isinstance(item, Collective) or (item.bytes is None and item.transfer_s is None):
        return 0.0, MEASURED
    there = settings.layout(item.axis, target)
    if item.transfer_s is None:
        found = collective_time(machine, item.kind, item.bytes or 0, there)
        return found.seconds, found.source
    here = run.settings.layout(item.axis, run.target)
    if there == here:
        return item.transfer_s, MEASURED
    size = item.bytes or 0
    new, old = collective_time(machine, item.kind, size, there), collective_time(machine, item.kind, size, here)
    if here.ranks <= 1 or old.seconds <= 0:
        return new.seconds, new.source
    return item.transfer_s * new.seconds / old.seconds, SCALED if new.source == MEASURED else new.source


def expected_maximum(count: int) -> float:
    """Return the expected maximum of independent standard normal values (Blom, 1958)."""
    return 0.0 if count <= 1 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def _interval(
    seconds: float, step: SimulatedStep, sources: set[str], run: ProfiledRun, target: Target
) -> tuple[float, float]:
    """Return the ends of the interval: independent errors are added as squares."""
    worst = max((UNCERTAINTY[source] for source in sources), default=0.0)
    doublings = abs(math.log2(target.workers / run.model.workers))
    errors = [
        BASE_UNCERTAINTY * seconds,
        DOUBLING_UNCERTAINTY * doublings * seconds,
        2 * ((run.record.metrics.speed_error or {}).get("relative") or 0.0) * seconds,
        worst * step.exposed_s,
        (run.waiting_s(target.workers) - run.own_waiting_s) / 2,
    ]
    both = math.hypot(*errors)
    hidden = HIDDEN_UNCERTAINTY * step.hidden_s
    return max(seconds - both, 0.0), seconds + math.hypot(both, hidden)


def _beyond(run: ProfiledRun, target: Target, sources: set[str]) -> str:
    """Return how far a target is outside of the measured range; empty if it is inside."""
    parts = []
    if target.workers > run.model.workers:
        parts.append(f"{target.workers / run.model.workers:g} x the workers of the profiled run ({run.model.workers})")
    if target.nodes > run.model.nodes:
        parts.append(f"{target.nodes} nodes instead of {run.model.nodes}")
    if MODEL in sources:
        parts.append("collectives from link speeds, not measured")
    elif SCALED in sources:
        parts.append("collectives scaled from another size")
    return ", ".join(parts)


def _notes(sources: set[str], items: Sequence[Item]) -> tuple[str, ...]:
    notes = []
    if MODEL in sources:
        notes.append("no preflight measured this machine: run distexp preflight with several workers")
    if any(isinstance(item, Collective) and item.bytes is None and item.transfer_s is None for item in items):
        notes.append("the size of some collectives is unknown: they count as 0 s")
    return tuple(notes)

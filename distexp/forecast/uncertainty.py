"""The interval of a forecast, and how far it is from what was measured."""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from distexp.config import ConfigError
from distexp.forecast.collectives import MEASURED, MODEL, SCALED
from distexp.forecast.communication import Target
from distexp.forecast.measured_step import MeasuredStep
from distexp.forecast.simulate import SimulatedStep
from distexp.runs.predictions import StoredForecast
from distexp.runs.record import RunRecord
from distexp.statistics.noise import SINGLE_CPU_RUN
from distexp.system.cache_dir import cache_dir
from distexp.system.files import write_json
from distexp.system.typed_values import number_of, read_dataclass

UNCERTAINTY = {MEASURED: 0.15, SCALED: 0.3, MODEL: 0.6}
"""Relative error of the exposed communication that the interval assumes, by the source of its duration."""
HIDDEN_UNCERTAINTY = 0.15
"""Fraction of the hidden communication by which a step may be longer: its kernels share the device with others."""
BASE_UNCERTAINTY = 0.03
"""Relative error of the interval at the profiled size, from run to run."""
DOUBLING_UNCERTAINTY = 0.01
"""Relative error that each doubling of the workers adds."""
HOST_SPREAD = 4 / 3
"""Factor by which launches on GPUs may be slower, or faster, in another run (docs/results/forecast.md)."""


@dataclass(frozen=True)
class HostChange:
    """Seconds by which a step is shorter, or longer, if the CPU is faster, or slower, by HOST_SPREAD."""

    shorter_s: float = 0.0
    longer_s: float = 0.0


LEAST_SHARE = 0.05
"""Smallest lower end of an interval, relative to the forecast: no step takes no time."""


def interval_of(
    seconds: float, step: SimulatedStep, sources: Set[str], run: MeasuredStep, target: Target, *, host: HostChange
) -> tuple[float, float]:
    """Return the ends of the interval. The errors are independent, so their squares are added.

    Args:
        seconds: The forecast.
        step: The simulated step.
        sources: Sources of the durations of its collectives.
        run: The profiled run.
        target: What was forecast.
        host: How the step changes with the speed of the CPU.
    """
    worst = max((UNCERTAINTY[source] for source in sources), default=0.0)
    speed_error = number_of(run.record.metrics.speed_error or {}, "relative") or 0.0
    errors = (
        BASE_UNCERTAINTY * seconds,
        DOUBLING_UNCERTAINTY * abs(math.log2(target.workers / run.model.workers)) * seconds,
        2 * speed_error * seconds,
        worst * step.exposed_s,
        (run.waiting_s(target.workers) - run.own_waiting_s) / 2,
        0.0 if run.model.on_gpu else SINGLE_CPU_RUN * seconds,  # As in the report: other programs share the cores.
    )
    combined = math.hypot(*errors)
    below = math.hypot(combined, host.shorter_s)
    above = math.hypot(combined, host.longer_s, HIDDEN_UNCERTAINTY * step.hidden_s)
    return max(seconds - below, LEAST_SHARE * seconds), seconds + above


def describe_distance(run: MeasuredStep, target: Target, sources: Set[str]) -> str:
    """Return how far a target is outside of the measured range; empty if it is inside."""
    parts = []
    if target.workers > run.model.workers:
        parts.append(f"{target.workers / run.model.workers:g} x the workers of the profiled run ({run.model.workers})")
    if target.nodes > run.model.nodes:
        parts.append(f"{target.nodes} nodes instead of {run.model.nodes}")
    if MODEL in sources:
        parts.append("collectives from link speeds, not measured")
    elif SCALED in sources:
        parts.append("collectives scaled from another number of workers")
    return ", ".join(parts)


def describe_limit(parts: dict[str, float], largest: str) -> str:
    """Return what limits a step most, other than its kernels; empty if nothing takes a tenth of it.

    Args:
        parts: Parts of the step.
        largest: The largest collective.
    """
    names = {
        "exposed_communication": f"communication, mainly the {largest}" if largest else "communication",
        "launch": "the launches of the CPU",
        "waiting": "the wait for the slowest worker",
    }
    total = sum(parts.values())
    part = max(names, key=lambda name: parts[name])
    return names[part] if parts[part] >= 0.1 * total else ""


# Errors of the forecasts of a machine: one file in the cache directory for each pair of a forecast and a run.
#
# A pair that is seen again replaces its file, so it counts once.


FOLDER = "forecast-errors"

COVERED_SHARE = 0.9
"""Fraction of the earlier errors that the interval covers."""

MAX_FORECASTS = 20
"""Number of earlier forecasts that count: those that were measured last."""

MIN_FORECASTS = 3
"""Number of earlier forecasts from which they count. The largest error of a few may be an accident of one run."""


@dataclass(frozen=True)
class ForecastError:
    """A forecast next to the measured step of the same training at this size.

    Attributes:
        forecast_s: Forecast duration of the step.
        measured_s: Measured median of the steps.
        inside: Whether the measured duration was in the interval.
        subject: Profiled run and size of the forecast. Empty: unknown.
        measured_at: Start of the measured run, ISO 8601. Empty: unknown.
    """

    forecast_s: float
    measured_s: float
    inside: bool
    subject: str = ""
    measured_at: str = ""

    @property
    def relative(self) -> float:
        """Return the error relative to the measured duration; positive if the forecast was too slow."""
        return self.forecast_s / self.measured_s - 1

    @property
    def factor(self) -> float:
        """Return by which factor the forecast was too slow or too fast; at least 1."""
        return max(self.forecast_s / self.measured_s, self.measured_s / self.forecast_s)


def compare_with_run(profiled: RunRecord, forecast: StoredForecast, measured: RunRecord) -> ForecastError | None:
    """Return the error of a forecast.

    It is None if the forecast is for another machine, or if the run measured no step time, made other steps, or ran
    under other conditions than the profiled run.
    """
    step_s = measured_step_s(measured)
    if (
        step_s is None
        or forecast.what_if
        or _Conditions.of(profiled) != _Conditions.of(measured)
        or not makes_steps_of(forecast, measured)
    ):
        return None
    inside = forecast.low_s <= step_s <= forecast.high_s
    return ForecastError(forecast.step_time_s, step_s, inside)


class _Conditions(NamedTuple):
    """What two runs must have in common, so that their speeds can be compared."""

    machine: str
    cpu_threads: object  # of a worker; None for a run on GPUs

    @classmethod
    def of(cls, record: RunRecord) -> _Conditions:
        cluster = record.config.get("cluster") or {}
        on_cpu = cluster.get("device") == "cpu"
        return cls(machine_name(record), cluster.get("cpus_per_worker") if on_cpu else None)


def makes_steps_of(forecast: StoredForecast, measured: RunRecord) -> bool:
    """Return whether the steps of a run are as large as in a forecast. A size that is not a number is unknown."""
    train = measured.config.get("train") or {}
    size, micro_batches = train.get("micro_batch_size"), train.get("gradient_accumulation_steps")
    return not isinstance(size, int) or (size, micro_batches) == (forecast.micro_batch_size, forecast.micro_batches)


def measured_step_s(record: RunRecord) -> float | None:
    """Return the median step of a completed run."""
    if record.status != "completed":
        return None
    median_s = number_of(record.metrics.step_time_s or {}, "p50")
    return median_s if median_s and median_s > 0 else None


def machine_name(record: RunRecord) -> str:
    """Return the name under which the errors of a machine are stored: that of its GPU, or of the host of a CPU."""
    environment = record.environment
    if environment is None:
        return "unknown"
    return environment.gpu_name or f"cpu of {environment.hostname or 'unknown'}"


def subject_of(profiled: RunRecord, nodes: int, workers_per_node: int) -> str:
    """Return the name of the forecast of a size of a run."""
    run = profiled.run
    return json.dumps([run.id, run.started_at, run.number, nodes, workers_per_node])


def store_error(profiled: RunRecord, forecast: StoredForecast, measured: RunRecord, error: ForecastError) -> None:
    """Keep the error of a forecast. Without a writable cache directory it is not kept."""
    runs = [[record.run.id, record.run.started_at, record.run.number] for record in (profiled, measured)]
    key = json.dumps([*runs, forecast.nodes, forecast.workers_per_node])
    name = hashlib.sha256(key.encode()).hexdigest()[:24]
    with suppress(ConfigError, OSError):
        path = _folder(machine_name(measured)) / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        subject = subject_of(profiled, forecast.nodes, forecast.workers_per_node)
        write_json(path, asdict(replace(error, subject=subject, measured_at=measured.run.started_at or "")))


def read_errors(machine: str) -> list[ForecastError]:
    """Return the errors of all forecasts that were compared on a machine."""
    with suppress(ConfigError):
        found = [read_dataclass(ForecastError, path) for path in sorted(_folder(machine).glob("*.json"))]
        return [error for error in found if error is not None and error.forecast_s > 0 and error.measured_s > 0]
    return []


def _folder(machine: str) -> Path:
    return cache_dir() / FOLDER / re.sub(r"[^A-Za-z0-9.+]+", "-", machine)


def largest_expected(errors: Sequence[ForecastError]) -> float:
    """Return the error that most of the last forecasts did not exceed: 0.1 for a factor of 1.1.

    It is 0 with too few forecasts. The largest error never counts.
    """
    sizes = sorted(_last_error_sizes(errors))
    if len(sizes) < MIN_FORECASTS:
        return 0.0
    covered = math.ceil(COVERED_SHARE * len(sizes))
    return sizes[min(covered, len(sizes) - 1) - 1]


def _last_error_sizes(errors: Sequence[ForecastError]) -> list[float]:
    """Return the sizes of the errors of the forecasts that were measured last.

    The repeats of a measured run count as one, with their median.
    """
    latest = sorted(_repeats(errors), key=lambda repeats: max(error.measured_at for error in repeats))
    return [statistics.median(error.factor - 1 for error in repeats) for repeats in latest[-MAX_FORECASTS:]]


def _repeats(errors: Sequence[ForecastError]) -> Iterable[list[ForecastError]]:
    """Group the errors of the same forecast. An error of an unknown forecast is a group of its own."""
    by_subject: dict[str, list[ForecastError]] = {}
    for number, error in enumerate(errors):
        by_subject.setdefault(error.subject or str(number), []).append(error)
    return by_subject.values()


def running_error(errors: Sequence[ForecastError]) -> str:
    """Return the sentence about earlier forecasts; empty without any."""
    if not errors:
        return ""
    median = statistics.median(abs(error.relative) for error in errors)
    inside = sum(error.inside for error in errors)
    count = f"{len(errors)} forecast{'s' if len(errors) > 1 else ''}"
    return f"Median error of {count} on this kind of machine: {median:.1%}. In the interval: {inside} of {len(errors)}."

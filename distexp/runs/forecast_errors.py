"""Errors of the forecasts of a machine: one file in the cache directory for each pair of a forecast and a run.

A pair that is seen again replaces its file, so it counts once.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from distexp.config import ConfigError
from distexp.data.cache import cache_dir
from distexp.runs.checked_values import number_of
from distexp.runs.forecast import StoredForecast
from distexp.runs.json_files import read_json, write_json
from distexp.runs.record import RunRecord
from distexp.runs.typed_values import typed

FOLDER = "forecast-errors"

WIDENING_QUANTILE = 0.9
"""Part of the earlier errors that the interval covers."""

LAST = 20
"""Number of earlier forecasts that count."""

FEWEST = 3
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
    train, step = measured.config.get("train") or {}, measured_step_s(measured)
    sizes = train.get("micro_batch_size"), train.get("gradient_accumulation_steps")
    if (
        step is None
        or forecast.what_if
        or _conditions(profiled) != _conditions(measured)
        or (isinstance(sizes[0], int) and sizes != (forecast.micro_batch_size, forecast.micro_batches))
    ):
        return None
    inside = forecast.low_s <= step <= forecast.high_s
    return ForecastError(forecast.step_time_s, step, inside)


def _conditions(record: RunRecord) -> tuple[str, object]:
    """Return the type of device, and on CPUs the threads of a worker."""
    cluster = record.config.get("cluster") or {}
    return machine_name(record), cluster.get("cpus_per_worker") if cluster.get("device") == "cpu" else None


def measured_step_s(record: RunRecord) -> float | None:
    """Return the median step of a completed run."""
    step = number_of(record.metrics.step_time_s or {}, "p50") if record.status == "completed" else None
    return step if step and step > 0 else None


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
    runs = [[each.run.id, each.run.started_at, each.run.number] for each in (profiled, measured)]
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
        found = [_read(path) for path in sorted(_folder(machine).glob("*.json"))]
        return [error for error in found if error is not None]
    return []


def _read(path: Path) -> ForecastError | None:
    try:
        error = typed(ForecastError, read_json(path))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return error if error.forecast_s > 0 and error.measured_s > 0 else None


def _folder(machine: str) -> Path:
    return cache_dir() / FOLDER / re.sub(r"[^A-Za-z0-9.+]+", "-", machine)


def largest_expected(errors: Sequence[ForecastError]) -> float:
    """Return the excess of the factor over 1 that most of the last forecasts did not exceed; 0 with too few of them.

    The repeats of a measured run count as one, with their median. The largest error never counts.
    """
    sizes = sorted(_last_sizes(errors))
    if len(sizes) < FEWEST:
        return 0.0
    return sizes[min(math.ceil(WIDENING_QUANTILE * len(sizes)) - 1, len(sizes) - 2)]


def _last_sizes(errors: Sequence[ForecastError]) -> list[float]:
    """Return the excess of the factor over 1 of the forecasts that were measured last."""
    by_subject: dict[str, list[ForecastError]] = {}
    for number, error in enumerate(errors):
        by_subject.setdefault(error.subject or str(number), []).append(error)
    latest = sorted(by_subject.values(), key=lambda repeats: max(error.measured_at for error in repeats))
    return [statistics.median(error.factor - 1 for error in repeats) for repeats in latest[-LAST:]]


def running_error(errors: Sequence[ForecastError]) -> str:
    """Return the sentence about earlier forecasts; empty without any."""
    if not errors:
        return ""
    median = statistics.median(abs(error.relative) for error in errors)
    inside = sum(error.inside for error in errors)
    count = f"{len(errors)} forecast{'s' if len(errors) > 1 else ''}"
    return f"Median error of {count} on this kind of machine: {median:.1%}. In the interval: {inside} of {len(errors)}."

"""Predictions on disk: the memory of a run, its forecasts, and their errors."""

import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from distexp.config import ConfigError
from distexp.config.overrides import format_count
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import Predicted
from distexp.runs.run_dir import FORECAST, PREDICTED
from distexp.system.cache_dir import cache_dir, file_name
from distexp.system.files import read_or_none, write_json
from distexp.system.typed_values import matches, number_of, parse_dataclass, read_dataclass

PHASE = "phase"

Curve = Mapping[str, Sequence[Any]]
"""The phase, and each part in MiB, at some points of a training step."""


def write_prediction(directory: Path, predicted: Predicted | None, curve: Curve) -> None:
    """Write the prediction of a run, and its curve through a training step. None: remove that of an earlier attempt."""
    if predicted is None:
        (directory / PREDICTED).unlink(missing_ok=True)
    else:
        write_json(directory / PREDICTED, {"predicted": asdict(predicted), "curve": dict(curve)})


def read_prediction(directory: Path) -> Predicted | None:
    """Return the prediction of a run; None if it has none."""
    return read_dataclass(Predicted, directory / PREDICTED, "predicted")


def read_curve(directory: Path) -> Curve:
    """Return the curve of a run's prediction; empty if it has none."""
    curve = read_or_none(directory / PREDICTED, "curve")
    if not isinstance(curve, dict) or not matches(curve.get(PHASE), list[str]):
        return {}
    lengths = {len(values) for values in curve.values() if isinstance(values, list)}
    is_curve = len(lengths) == 1 and all(matches(curve[name], list[float]) for name in curve if name != PHASE)
    return curve if is_curve else {}


SCHEMA = 1


@dataclass(frozen=True)
class StoredForecast:
    """The forecast of a profiled run for another number of workers."""

    nodes: int
    workers_per_node: int  # workers of each node
    run_id: str  # id of the same training at this size
    micro_batch_size: int  # samples of a worker in a forward pass
    micro_batches: int  # micro-batches of an optimizer step
    samples_per_step: float  # samples of all workers in an optimizer step
    step_time_s: float  # most likely duration of the step
    low_s: float  # lower end of the interval
    high_s: float  # upper end of the interval
    created_at: str = ""  # ISO 8601, UTC
    beyond: str = ""  # how far the size is beyond the measured range; empty inside of it
    what_if: str = ""  # options for another machine, which later runs do not share; empty without them

    @property
    def workers(self) -> int:
        """Return the number of workers on all nodes."""
        return self.nodes * self.workers_per_node

    @property
    def samples_per_second(self) -> float:
        """Return the throughput over all workers."""
        return self.samples_per_step / self.step_time_s


def cap_efficiency(high: float, efficiency: float) -> float:
    """Return the upper end of an interval of the efficiency, for workers whose work does not shrink with their number.

    It is at most 100 %, or the forecast efficiency if that is more, as with a slower network at the baseline.
    """
    return min(high, max(efficiency, 1.0))


def write_forecasts(run_dir: Path, forecasts: Sequence[StoredForecast]) -> None:
    """Add forecasts to those of a run, in place of those of the same size, steps and machine. Raise OSError."""
    size_of = attrgetter("nodes", "workers_per_node", "run_id", "micro_batches", "samples_per_step", "what_if")
    new = set(map(size_of, forecasts))
    kept = [old for old in read_forecasts(run_dir) if size_of(old) not in new]
    ordered = sorted([*kept, *forecasts], key=lambda forecast: (forecast.workers, forecast.nodes))
    write_json(run_dir / FORECAST, {"schema": SCHEMA, "forecasts": [asdict(forecast) for forecast in ordered]})


def read_forecasts(run_dir: Path) -> list[StoredForecast]:
    """Return the forecasts of a run, by the number of workers; none if the file is missing or damaged."""
    content = read_or_none(run_dir / FORECAST)
    try:
        forecasts = content["forecasts"] if content["schema"] == SCHEMA else []
        return [parse_dataclass(StoredForecast, raw) for raw in forecasts if _is_valid(raw)]
    except (ValueError, TypeError, KeyError):
        return []


def _is_valid(raw: Any) -> bool:
    """Return whether an entry has positive sizes and times."""
    names = ("nodes", "workers_per_node", "samples_per_step", "step_time_s", "low_s", "high_s")
    return isinstance(raw, dict) and all(matches(raw.get(name), float) and raw[name] > 0 for name in names)


FOLDER = "forecast-errors"
"""Folder with a file for each pair of a forecast and a run. A pair that is seen again replaces its file."""


@dataclass(frozen=True)
class ForecastError:
    """A forecast next to the measured step of the same training at this size."""

    forecast_s: float  # forecast duration of the step
    measured_s: float  # measured median of the steps
    inside: bool  # whether the measured duration was in the interval
    subject: str = ""  # Profiled run and size of the forecast. Empty: unknown.
    measured_at: str = ""  # Start of the measured run, ISO 8601. Empty: unknown.

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
    is_comparable = _conditions(profiled) == _conditions(measured) and makes_steps_of(forecast, measured)
    if step_s is None or forecast.what_if or not is_comparable:
        return None
    return ForecastError(forecast.step_time_s, step_s, inside=forecast.low_s <= step_s <= forecast.high_s)


def _conditions(record: RunRecord) -> tuple[str, object]:
    """Return what two runs must have in common, so that their speeds can be compared: machine, and threads on CPUs."""
    cluster = record.config.get("cluster") or {}
    return machine_name(record), cluster.get("cpus_per_worker") if cluster.get("device") == "cpu" else None


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
    return cache_dir() / FOLDER / file_name(machine)


def largest_expected(errors: Sequence[ForecastError]) -> float:
    """Return the error that 90 % of the last 20 forecasts did not exceed: 0.1 for a factor of 1.1.

    The largest error never counts. With fewer than 3 forecasts it may be an accident of one run, so the result is 0.
    The repeats of a measured run count as one, with their median.
    """
    by_subject: dict[str, list[ForecastError]] = {}
    for number, error in enumerate(errors):
        by_subject.setdefault(error.subject or str(number), []).append(error)
    latest = sorted(by_subject.values(), key=lambda repeats: max(error.measured_at for error in repeats))
    sizes = sorted(statistics.median(error.factor - 1 for error in repeats) for repeats in latest[-20:])
    if len(sizes) < 3:
        return 0.0
    covered = math.ceil(0.9 * len(sizes))
    return sizes[min(covered, len(sizes) - 1) - 1]


def running_error(errors: Sequence[ForecastError]) -> str:
    """Return the sentence about earlier forecasts; empty without any."""
    if not errors:
        return ""
    median = statistics.median(abs(error.relative) for error in errors)
    inside = sum(error.inside for error in errors)
    count = format_count(len(errors), "forecast")
    return f"Median error of {count} on this kind of machine: {median:.1%}. In the interval: {inside} of {len(errors)}."

"""Forecasts of time and predictions of memory, next to the measured runs of the same training."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distexp.report.data.metrics import METRICS_BY_NAME
from distexp.report.data.overview import Overview
from distexp.report.data.repeats import RunGroup, format_metric
from distexp.report.data.rows import Row, world_size
from distexp.report.data.scaling_series import ScalingSeries, make_forecast_series
from distexp.runs import predictions
from distexp.system.typed_values import number_of
from distexp.tables.columns import TextTable

MAX_ROWS = 40
MEASURED = ("measured run", "measured (ms/step)", "error", "in interval")
RUN, SIZE, BATCH = "run", "nodes x workers per node", "global batch"
HEADER = (RUN, SIZE, BATCH, "forecast (ms/step)", "interval (ms)", "samples/s")
FORECAST_NOTE = "Forecast by distexp forecast. Error: forecast minus measured, in percent of the measured median step."
PREDICTIONS_TITLE = "Predicted and measured memory (MiB)"
PREDICTIONS_NOTE = (
    "Predicted by distexp plan before the run. Error: predicted minus measured, in percent of the measured peak."
)


@dataclass(frozen=True)
class ForecastRow:
    """The forecast of a profiled run for one size, with the measured training of this size, and the errors."""

    row: Row
    forecast: predictions.StoredForecast
    measured: RunGroup | None = None
    errors: tuple[tuple[Row, predictions.ForecastError], ...] = ()

    @property
    def mean_error(self) -> predictions.ForecastError | None:
        """Return the error relative to the mean of the measured runs; None without them."""
        if not self.errors:
            return None
        step = statistics.fmean(error.measured_s for _, error in self.errors)
        inside = self.forecast.low_s <= step <= self.forecast.high_s
        return predictions.ForecastError(self.forecast.step_time_s, step, inside)


def find_forecasts(overview: Overview) -> list[ForecastRow]:
    """Return the forecasts of all profiled runs, with the measured runs."""
    return [
        _with_measured(overview, group, row, forecast)
        for group in overview.groups
        for row in group.rows
        if row.path is not None and row.completed
        for forecast in predictions.read_forecasts(row.path.parent)
    ]


def _with_measured(overview: Overview, group: RunGroup, row: Row, forecast: predictions.StoredForecast) -> ForecastRow:
    """Return a forecast with the first training that is the same at this size, by its id, or in the same series."""
    for other in _candidates(overview, group, forecast):
        compared = ((run, predictions.compare_with_run(row.record, forecast, run.record)) for run in other.counted_rows)
        errors = tuple((run, error) for run, error in compared if error is not None)
        if errors:
            return ForecastRow(row, forecast, other, errors)
    return ForecastRow(row, forecast)


def _candidates(overview: Overview, group: RunGroup, forecast: predictions.StoredForecast) -> Iterator[RunGroup]:
    """Yield the groups that may be the same training at another size. The profiled size itself is no forecast."""
    others = [other for other in overview.groups if other is not group]
    yield from (other for other in others if any(row.record.run.id == forecast.run_id for row in other.rows))
    for series in overview.series:
        if any(point.group is group for point in series.points):
            size = (forecast.workers, forecast.nodes)
            alike = [point.group for point in series.points if (point.workers, point.nodes) == size]
            yield from (other for other in alike if other is not group)


def keep_errors(overview: Overview) -> None:
    """Keep the errors of forecasts that were measured later. They widen the intervals of further forecasts."""
    for found in find_forecasts(overview):
        for row, error in found.errors:
            predictions.store_error(found.row.record, found.forecast, row.record, error)


def build_forecast_table(forecasts: Sequence[ForecastRow]) -> TextTable | None:
    """Build the table with a row per size and global batch, without the profiled ones; None without forecasts."""
    found = _newest([entry for entry in forecasts if not _is_profiled(entry)])
    if not found:
        return None
    measured = any(entry.errors for entry in found)
    header, cells = (*HEADER, *(MEASURED if measured else ())), [_cells(entry) for entry in found[:MAX_ROWS]]
    columns = {title: [row[position] for row in cells] for position, title in enumerate(header)}
    if len(set(zip(columns[RUN], columns[SIZE], strict=True))) == len(cells):
        del columns[BATCH]
    title = "Forecast and measured" if measured else "Forecast"
    machines = dict.fromkeys(predictions.machine_name(entry.row.record) for entry in found if entry.errors)
    errors = {machine: predictions.running_error(predictions.read_errors(machine)) for machine in machines}
    notes = [FORECAST_NOTE if measured else "Forecast by distexp forecast."]
    notes += [f"{machine}: {text}" for machine, text in errors.items() if text]
    notes += [f"{len(found) - MAX_ROWS} more sizes are in the files forecast.json."] if len(found) > MAX_ROWS else []
    rows = tuple(zip(*columns.values(), strict=True))
    return TextTable(title, tuple(columns), rows, " ".join(notes), num_labels=2 + (BATCH in columns))


def _is_profiled(found: ForecastRow) -> bool:
    """Return whether a forecast is for the size and the steps of the profiled run, which are measured."""
    forecast, record = found.forecast, found.row.record
    size = (world_size(record), (record.config.get("cluster") or {}).get("nodes"))
    return (forecast.workers, forecast.nodes) == size and predictions.makes_steps_of(forecast, record)


def _newest(found: Sequence[ForecastRow]) -> list[ForecastRow]:
    """Return one forecast of each size and global batch: one that was measured, and the newest of these."""
    best: dict[tuple[object, ...], ForecastRow] = {}
    for entry in found:
        key = (id(entry.row), _size(entry.forecast), entry.forecast.samples_per_step)
        best[key] = max(best.get(key, entry), entry, key=lambda each: (bool(each.errors), each.forecast.created_at))
    return list(best.values())


def _size(forecast: predictions.StoredForecast) -> str:
    return f"{forecast.nodes} x {forecast.workers_per_node} {forecast.what_if}".rstrip()


def _cells(found: ForecastRow) -> tuple[str, ...]:
    forecast, error = found.forecast, found.mean_error
    interval = f"{_ms(forecast.low_s)} to {_ms(forecast.high_s)}"
    label = (found.row.label, _size(forecast), f"{forecast.samples_per_step:,.0f}")
    cells = (*label, _ms(forecast.step_time_s), interval, f"{forecast.samples_per_second:,.1f}")
    if error is None or found.measured is None:
        return (*cells, "-", "-", "-", "-")
    inside = "yes" if error.inside else "no"
    return (*cells, found.measured.label, _ms(error.measured_s), f"{error.relative:+.1%}", inside)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"


@dataclass(frozen=True)
class ForecastCurve:
    """Forecasts to draw next to the measured points of a series, relative to its baseline.

    A forecast is of the median step, but a measured speed is a mean. So forecasts are multiplied by the ratio of both
    in the profiled run. Its own forecast then lies on its measured point.
    """

    series: ScalingSeries
    row: Row
    forecasts: tuple[predictions.StoredForecast, ...]

    @property
    def median_to_mean(self) -> float:
        """Return the median step of the profiled run divided by its mean step; 1 if one is unknown."""
        metrics = self.row.record.metrics
        median_s = number_of(metrics.step_time_s or {}, "p50")
        return median_s * metrics.train_steps_per_second if median_s and metrics.train_steps_per_second else 1.0

    def speed(self, forecast: predictions.StoredForecast, step_s: float) -> float:
        """Return the mean samples per second for a median duration of the step."""
        return forecast.samples_per_step / step_s * self.median_to_mean

    def efficiency(self, forecast: predictions.StoredForecast, step_s: float) -> float:
        """Return ideal time / real time for a median duration of the step."""
        base = self.series.baseline
        return self.speed(forecast, step_s) / forecast.workers / (base.speed / base.workers)

    def highest_efficiency(self, forecast: predictions.StoredForecast) -> float:
        """Return the upper end of the interval of the efficiency, as the table of ``distexp forecast`` does.

        It is capped, unless workers have shares of the optimizer states: they have less work at larger sizes.
        """
        high, strategy = self.efficiency(forecast, forecast.low_s), self.row.record.strategy
        keeps_work = strategy is not None and strategy.keeps_states_whole is True
        if forecast.workers > self.series.baseline.workers and not keeps_work:
            return high
        return predictions.cap_efficiency(high, self.efficiency(forecast, forecast.step_time_s))


def find_curves(overview: Overview, found: Sequence[ForecastRow]) -> list[ForecastCurve]:
    """Return a curve for each profiled run. A run in no series gets one with itself as the only measured point."""
    runs = {id(entry.row): entry.row for entry in found}
    curves = [_curve(overview, row, [entry.forecast for entry in found if entry.row is row]) for row in runs.values()]
    return [curve for curve in curves if curve is not None]


def _curve(overview: Overview, row: Row, forecasts: Sequence[predictions.StoredForecast]) -> ForecastCurve | None:
    group = next(group for group in overview.groups if any(member is row for member in group.rows))
    series = next((s for s in overview.series if any(point.group is group for point in s.points)), None)
    series = series or make_forecast_series(group, overview.varied)
    if series is None:
        return None
    fewest = series.baseline.workers
    newest = max(forecast.created_at for forecast in forecasts)  # Earlier commands may have had another global batch.
    chosen = [forecast for forecast in forecasts if forecast.workers >= fewest and forecast.created_at == newest]
    drawn = {forecast.workers: forecast for forecast in reversed(chosen)}  # with the fewest nodes
    points = tuple(drawn[workers] for workers in sorted(drawn))
    return ForecastCurve(series, row, points) if any(point.workers > fewest for point in points) else None


PREDICTIONS = {  # metric of each column, by its title
    "predicted": "predicted_peak_allocated_mib",
    "measured": "torch_peak_allocated_mib",
    "error %": "prediction_error_pct",
    "reserved, predicted": "predicted_peak_reserved_mib",
    "reserved, measured": "torch_peak_reserved_mib",
    "nvidia-smi, predicted": "predicted_nvidia_smi_mib",
    "nvidia-smi, measured": "gpu_peak_mib",
    "host, predicted": "predicted_host_peak_mib",
    "host, measured": "cpu_peak_mib",
}


def build_predictions_table(overview: Overview) -> TextTable | None:
    """Build the table with a row per training; None if no run was predicted."""
    names = (PREDICTIONS["predicted"], PREDICTIONS["host, predicted"])
    groups = [group for group in overview.groups if any(group.metric(name) for name in names)]
    if not groups:
        return None
    columns = {title: format_metric(groups, METRICS_BY_NAME[name]) for title, name in PREDICTIONS.items()}
    labels = overview.label_columns([group.label for group in groups], groups)
    return TextTable.from_columns(PREDICTIONS_TITLE, {**labels, **columns}, PREDICTIONS_NOTE, num_labels=len(labels))

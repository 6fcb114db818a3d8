"""Measured runs of the forecast sizes: those in the sweep of the profiled run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distexp.forecast.profiled_run import ProfiledRun
from distexp.forecast.size_row import SizeRow
from distexp.runs.forecast import StoredForecast
from distexp.runs.forecast_errors import ForecastError, compare_with_run, store_error
from distexp.runs.record import RunRecord
from distexp.runs.record_search import read_records


def add_measured(run: ProfiledRun, rows: Sequence[SizeRow], stored: Sequence[StoredForecast]) -> list[SizeRow]:
    """Return the rows with the measured runs of the same training, and keep their errors.

    Args:
        run: The profiled run.
        rows: The sizes.
        stored: What is kept of each row that has a forecast.
    """
    records = {record.run.id: record for record in _siblings(run)}
    forecasts = {(forecast.nodes, forecast.workers_per_node): forecast for forecast in stored}
    return [_with_measured(run, row, forecasts.get(row.size), records.get(row.cell.id)) for row in rows]


def _siblings(run: ProfiledRun) -> list[RunRecord]:
    """Return the completed runs in the sweep of the profiled run, without the runs of its own size."""
    size = ("nodes", "workers_per_node")
    own = [run.setting("cluster", name) for name in size]
    return [
        record for record in read_records(run.command_path.parent).records
        if record.status == "completed" and [(record.config.get("cluster") or {}).get(name) for name in size] != own
    ]  # fmt: skip


def _with_measured(
    run: ProfiledRun, row: SizeRow, forecast: StoredForecast | None, record: RunRecord | None
) -> SizeRow:
    if forecast is None or record is None:
        return row
    error: ForecastError | None = compare_with_run(run.record, forecast, record)
    if error is not None:
        store_error(run.record, forecast, record, error)
    return replace(row, measured=error)

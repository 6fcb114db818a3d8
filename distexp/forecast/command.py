"""Output of ``distexp forecast`` for the sizes that Hydra composed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from omegaconf import OmegaConf

from distexp.compose.cells import Cell
from distexp.config import ConfigError, ForecastConfig
from distexp.exceptions import SweepFailedError
from distexp.forecast.forecast_table import EXPOSED, answer, notes, sizes_table
from distexp.forecast.profiled_run import ProfiledRun, read_profiled_run
from distexp.forecast.size_rows import SizeRow, add_measured, forecast_sizes
from distexp.plan.command import show_predictions
from distexp.plan.planned_cells import PlannedCell, plan_cells
from distexp.plan.planner import Planner, with_gpu
from distexp.plan.verdict import memory_to_fit_mib, predict
from distexp.runs import predictions
from distexp.runs.disturbance import describe_disturbance
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import RECORD
from distexp.runs.step_files import read_ranks
from distexp.system.files import nan_to_none
from distexp.tables.columns import make_console, print_plain

LARGE_SHARE_WITHOUT_CORE = 0.2  # share of the profiled step without a CPU core from which a forecast has a warning


def run_forecast(cells: Sequence[Cell]) -> None:
    """Print the forecast of the sizes of a command. Raise ConfigError if no size can be forecast."""
    options = cast(ForecastConfig, OmegaConf.to_object(cells[0].composed.forecast))
    with Planner() as planner:
        print_forecast(read_profiled_run(Path(str(options.run))), cells, options, planner)


def print_forecast(run: ProfiledRun, cells: Sequence[Cell], options: ForecastConfig, planner: Planner) -> None:
    """Print the forecast of all sizes, and keep it in the directory of the run. Raise ConfigError if there is none."""
    rows = forecast_sizes(run, cells, options, predictions.read_errors(predictions.machine_name(run.record)))
    rows = add_memory(rows, options.memory, planner)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    kept = (stored_forecast(row, what_if(options, run.record, row.size[0])) for row in rows)
    stored = [forecast for forecast in kept if forecast is not None]
    try:
        predictions.write_forecasts(run.directory, [replace(forecast, created_at=now) for forecast in stored])
    except OSError as error:
        print(f"distexp: the forecast is not kept for the report: {run.directory}: {error.strerror}", file=sys.stderr)
    rows = add_measured(run, rows, stored)
    if options.output != "json":
        _print_table(run, rows)
        return
    print(json.dumps(nan_to_none([row_to_json(row) for row in rows]), indent=2))
    for line in _disturbed(run):
        print(f"distexp: {line}", file=sys.stderr)
    if not any(row.forecast for row in rows):
        raise SweepFailedError


def _print_table(run: ProfiledRun, rows: Sequence[SizeRow]) -> None:
    if not any(row.forecast for row in rows):
        raise ConfigError(list(dict.fromkeys(row.error for row in rows)))
    console, workers = make_console(), "GPUs" if run.on_gpu else "workers"
    for line in (answer(rows, workers), *_disturbed(run)):
        print_plain(console, line)
    console.print()
    for part in sizes_table(rows, workers, console.width):
        console.print(part, soft_wrap=True)
    console.print()
    for line in (*notes(rows, workers, run.setting("cluster", "cpus_per_worker")), *_earlier_errors(run)):
        print_plain(console, line, style="dim")


def _disturbed(run: ProfiledRun) -> Iterator[str]:
    """Yield a warning if other programs slowed the profiled run or its profiled step down."""
    again = "so the forecast may be wrong. Profile it again when no other program runs."
    ranks = read_ranks(run.record)
    shares = [rank.without_core_ms / rank.step_ms for rank in ranks if rank.without_core_ms is not None]
    share = fmean(shares) if shares else 0.0
    if disturbance := describe_disturbance(run.record):
        yield f"The profiled run was disturbed ({disturbance}), {again}"
    elif share > LARGE_SHARE_WITHOUT_CORE:
        yield f"The workers waited for a free CPU core for {share:.0%} of the profiled step, {again}"


def _earlier_errors(run: ProfiledRun) -> Iterator[str]:
    """Yield the errors of earlier forecasts on this machine, and what they mean for the intervals."""
    if errors := predictions.read_errors(predictions.machine_name(run.record)):
        least, meaning = 1 + predictions.largest_expected(errors), "Their errors do not widen the intervals."
        if least > 1:
            meaning = f"An interval reaches at least from the forecast / {least:.2f} to the forecast x {least:.2f}."
        yield f"{predictions.running_error(errors)} {meaning}"


def stored_forecast(row: SizeRow, assumed: str) -> predictions.StoredForecast | None:
    """Return what is kept of a size; None without a forecast."""
    forecast, config = row.forecast, row.cell.config
    if forecast is None or config is None:
        return None
    target = forecast.target
    return predictions.StoredForecast(
        nodes=target.nodes,
        workers_per_node=target.workers_per_node,
        run_id=row.cell.id,
        micro_batch_size=config.train.micro_batch,
        micro_batches=target.micro_batches,
        samples_per_step=target.samples_per_step,
        step_time_s=forecast.step_time_s,
        low_s=forecast.low_s,
        high_s=forecast.high_s,
        beyond=forecast.beyond,
        what_if=assumed,
    )


def row_to_json(row: SizeRow) -> dict[str, Any]:
    """Return a size for programs. Times are in seconds, and shares are fractions."""
    forecast, measured = row.forecast, row.measured
    nodes, workers_per_node = row.size
    low, high = row.efficiency_interval or (None, None)
    found: dict[str, Any] = {
        "nodes": nodes,
        "workers_per_node": workers_per_node,
        **{name: getattr(forecast, name, None) for name in ("step_time_s", "low_s", "high_s")},
        "samples_per_second": row.samples_per_second,
        "efficiency": row.efficiency,
        "efficiency_low": low,
        "efficiency_high": high,
        "workers": row.workers,
        "micro_batches": forecast and forecast.target.micro_batches,
        "samples_per_step": forecast and forecast.target.samples_per_step,
        "parts_s": dict(forecast.parts) if forecast else {},
        "exposed_communication_share": row.share(EXPOSED),
        "bottleneck": row.bottleneck[0] if row.bottleneck else None,
        "bottleneck_share": row.bottleneck[1] if row.bottleneck else None,
        "times_the_measured": row.times_the_measured,
        "limit": forecast.limit if forecast else "",
        "beyond": forecast.beyond if forecast else "",
        "notes": list(forecast.notes) if forecast else [],
        "memory": asdict(row.memory) if row.memory else None,
        "j_per_step": row.power.j_per_step(forecast) if row.power and forecast else None,
        "j_per_sample": row.j_per_sample,
        "price_per_million_samples": row.price,
        "measured_step_time_s": measured and measured.measured_s,
        "error": measured and measured.relative,
    }
    return {**found, "reason": row.error} if row.error else found


# Assumptions of a forecast that a later run may not share. Then the difference is no error of the forecast.


NETWORK_KEYS = ("network", "rail_optimized", "oversubscription")


def what_if(options: ForecastConfig, profiled: RunRecord, nodes: int) -> str:
    """Return the options that make a forecast one for another machine, as typed; empty without them."""
    found = []
    if options.preflight is not None:
        measured = None
        with suppress(ValueError):
            measured = predictions.machine_name(RunRecord.read(Path(options.preflight) / RECORD))
        if measured != predictions.machine_name(profiled):
            found.append(f"forecast.preflight={options.preflight}")
    # A record does not have its network, so each option of it is an assumption. One node has no network.
    values = {name: getattr(options, name) for name in NETWORK_KEYS if nodes > 1}
    changed = {name: value for name, value in values.items() if value != getattr(ForecastConfig(), name)}
    return " ".join([*found, *(f"forecast.{name}={str(value).lower()}" for name, value in changed.items())])


CACHED, OFF = "cached", "off"

MAX_PREDICTED_WORKERS = 64  # most workers of a size whose memory is predicted
TOO_LARGE = f"memory is predicted up to {MAX_PREDICTED_WORKERS} workers only"
NOT_CACHED = "memory was not predicted before: leave forecast.memory=cached out"


def add_memory(rows: Sequence[SizeRow], mode: str, planner: Planner) -> list[SizeRow]:
    """Return the rows with their predicted memory. The mode is ``predict``, ``cached`` or ``off``."""
    if mode == OFF:
        return list(rows)

    def reason(row: SizeRow) -> str:
        if mode == CACHED and row.cell.config is not None:
            return "" if planner.cached(with_gpu(row.cell.config)) is not None else NOT_CACHED
        return TOO_LARGE if row.workers > MAX_PREDICTED_WORKERS else ""

    reasons = [row.error or reason(row) for row in rows]
    wanted = [row.cell for row, why in zip(rows, reasons, strict=True) if not why]
    configs = [cell.config for cell in wanted if cell.config is not None]
    with show_predictions(planner.count_missing(configs)) as advance:
        planned = iter(plan_cells(wanted, planner, advance))
    return [
        replace(row, memory_error=why) if why else _with_memory(row, next(planned))
        for row, why in zip(rows, reasons, strict=True)
    ]


def _with_memory(row: SizeRow, planned: PlannedCell) -> SizeRow:
    estimate, config, memory = planned.estimate, planned.cell.config, planned.predicted
    if estimate is not None and config is not None and estimate.on_cpu:
        # For a node with the memory of this machine, although a local run would simulate all nodes on it.
        memory = predict(replace(estimate, step_mib=estimate.host_mib), memory_to_fit_mib(config))
    return replace(row, memory=memory, memory_error=planned.error)

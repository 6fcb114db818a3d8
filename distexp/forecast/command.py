"""Output of ``distexp forecast`` for the sizes that Hydra composed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import cast

from omegaconf import OmegaConf

from distexp.config import ConfigError, ForecastConfig
from distexp.console.plain_text import print_plain
from distexp.console.terminal import make_console
from distexp.exceptions import SweepFailedError
from distexp.forecast.json_output import row_to_json
from distexp.forecast.measured import add_measured
from distexp.forecast.memory import add_memory
from distexp.forecast.profiled_run import ProfiledRun, read_profiled_run
from distexp.forecast.rows import forecast_sizes
from distexp.forecast.size_row import SizeRow
from distexp.forecast.table import answer, notes, sizes_table
from distexp.forecast.what_if import what_if
from distexp.launch.cell import Cell
from distexp.plan.planner import Planner
from distexp.runs.disturbance import describe_disturbance
from distexp.runs.entry_values import number_of
from distexp.runs.forecast import StoredForecast, write_forecasts
from distexp.runs.forecast_errors import largest_expected, machine_name, read_errors, running_error
from distexp.runs.json_files import nan_to_none

LARGE_SHARE_WITHOUT_CORE = 0.2
"""Share of the profiled step without a CPU core from which a forecast has a warning."""


def run_forecast(cells: Sequence[Cell]) -> None:
    """Print the forecast of the sizes of a command.

    Args:
        cells: The configuration of each size.

    Raises:
        ConfigError: no size can be forecast.
    """
    options = cast(ForecastConfig, OmegaConf.to_object(cells[0].composed.forecast))
    with Planner() as planner:
        print_forecast(read_profiled_run(Path(str(options.run))), cells, options, planner)


def print_forecast(run: ProfiledRun, cells: Sequence[Cell], options: ForecastConfig, planner: Planner) -> None:
    """Print the forecast of all sizes, and keep it in the directory of the profiled run.

    Args:
        run: The profiled run.
        cells: The configuration of each size.
        options: Options of the forecast.
        planner: Source of estimates of memory.

    Raises:
        ConfigError: no size can be forecast.
    """
    rows = forecast_sizes(run, cells, options, read_errors(machine_name(run.record)))
    rows = add_memory(rows, options.memory, planner)
    kept = (stored_forecast(row, what_if(options, run.record, row.size[0])) for row in rows)
    stored = [forecast for forecast in kept if forecast is not None]
    _store(run, stored)
    rows = add_measured(run, rows, stored)
    if options.output == "json":
        print(json.dumps(nan_to_none([row_to_json(row) for row in rows]), indent=2))
        for line in _disturbed(run):
            print(f"distexp: {line}", file=sys.stderr)
        if not any(row.forecast for row in rows):
            raise SweepFailedError
    else:
        _print_table(run, rows)


def _print_table(run: ProfiledRun, rows: Sequence[SizeRow]) -> None:
    if not any(row.forecast for row in rows):
        raise ConfigError(list(dict.fromkeys(row.error for row in rows)))
    console, workers = make_console(), "GPUs" if run.on_gpu else "workers"
    print_plain(console, answer(rows, workers))
    for line in _disturbed(run):
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
    share = _share_without_core(run)
    if disturbance := describe_disturbance(run.record):
        yield f"The profiled run was disturbed ({disturbance}), {again}"
    elif share > LARGE_SHARE_WITHOUT_CORE:
        yield f"The workers waited for a free CPU core for {share:.0%} of the profiled step, {again}"


def _share_without_core(run: ProfiledRun) -> float:
    """Return the mean share of the profiled step in which a worker had no core; 0 on GPUs, or if it is unknown."""
    ranks = run.record.metrics.step_breakdown or []
    known = [(number_of(rank, "without_core_ms"), number_of(rank, "step_ms")) for rank in ranks]
    shares = [waited / step for waited, step in known if waited is not None and step]
    return fmean(shares) if shares else 0.0


def _earlier_errors(run: ProfiledRun) -> Iterator[str]:
    """Yield the errors of earlier forecasts on this machine, and what they mean for the intervals."""
    if errors := read_errors(machine_name(run.record)):
        least = 1 + largest_expected(errors)
        widened = f"An interval reaches at least from the forecast / {least:.2f} to the forecast x {least:.2f}."
        yield f"{running_error(errors)} {widened if least > 1 else 'Their errors do not widen the intervals.'}"


def _store(run: ProfiledRun, stored: Sequence[StoredForecast]) -> None:
    """Keep the forecasts for the report. Warn if the run directory is not writable."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        write_forecasts(run.directory, [replace(forecast, created_at=now) for forecast in stored])
    except OSError as error:
        print(f"distexp: the forecast is not kept for the report: {run.directory}: {error.strerror}", file=sys.stderr)


def stored_forecast(row: SizeRow, assumed: str) -> StoredForecast | None:
    """Return what is kept of a size; None without a forecast.

    Args:
        row: The size.
        assumed: Options for another machine.
    """
    forecast, config = row.forecast, row.cell.config
    if forecast is None or config is None:
        return None
    target = forecast.target
    return StoredForecast(
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

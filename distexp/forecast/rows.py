"""The sizes of a forecast: each with its forecast, or with the reason why it has none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from distexp.config import Config, ForecastConfig
from distexp.forecast.energy import read_power
from distexp.forecast.machine import load_machine
from distexp.forecast.profiled_run import ProfiledRun
from distexp.forecast.size_row import Baseline, SizeRow
from distexp.forecast.sizes import sizes_of
from distexp.forecast.steps import forecast_steps
from distexp.forecast.target import Forecast, Target
from distexp.launch.cell import Cell
from distexp.resolve.accumulation import OTHER_MICRO_BATCH
from distexp.runs.failure_text import join_errors
from distexp.runs.forecast_errors import ForecastError, largest_expected, subject_of


def forecast_sizes(
    run: ProfiledRun, cells: Sequence[Cell], options: ForecastConfig, earlier: Sequence[ForecastError]
) -> list[SizeRow]:
    """Return the forecast of each cell.

    Args:
        run: The profiled run.
        cells: A cell for each size.
        options: Options of the forecast.
        earlier: Errors of earlier forecasts on this machine, which widen the intervals.

    Raises:
        ConfigError: the run cannot be forecast.
    """
    rows = [_make_row(run, cell) for cell in cells]
    targets = [_target(run, row.cell.config) for row in rows if not row.error and row.cell.config is not None]
    own = _own_target(run)
    machine = load_machine(run.directory, options) if targets else None
    trusted = [package for cell in cells if cell.config is not None for package in cell.config.trusted_packages]
    forecasts = forecast_steps(run.directory, [own, *targets], machine, trusted) if targets else []
    widened = iter(
        [
            forecast if _is_own(run, forecast) else _widen(forecast, _of_others(run, forecast, earlier))
            for forecast in forecasts[1:]
        ]
    )
    power = read_power(run, own.samples_per_step, own.micro_batches)
    found = [row if row.error else replace(row, forecast=next(widened), power=power) for row in rows]
    baseline = _baseline(forecasts[:1], [row.forecast for row in found if row.forecast])
    return [replace(row, baseline=baseline, profiled_workers=run.workers) for row in found]


def _make_row(run: ProfiledRun, cell: Cell) -> SizeRow:
    config = cell.config or cell.decided
    size = sizes_of(cell.composed.cluster if config is None else _size_values(config))
    error = join_errors(cell.errors).replace(OTHER_MICRO_BATCH, "") or _other_steps(run, cell.config)
    return SizeRow(size, cell, error=error)


def _size_values(config: Config) -> Mapping[str, Any]:
    return {"nodes": config.cluster.nodes, "workers_per_node": config.cluster.workers_per_node or 1}


def _other_steps(run: ProfiledRun, config: Config | None) -> str:
    """Return why the micro-batches of a size are not those of the profile; empty if they are."""
    if config is None:
        return ""
    pairs = {
        "train.micro_batch_size": (config.train.micro_batch_size, run.micro_batch_size),
        "model.num_layers": (config.model.num_layers, run.setting("model", "num_layers")),
    }
    changed = [f"{key}={new} instead of {old}" for key, (new, old) in pairs.items() if new != old]
    if not changed:
        return ""
    return f"{', '.join(changed)} (scaling={config.scaling.name}): not forecast, profile a run with these values"


def _target(run: ProfiledRun, config: Config) -> Target:
    cluster, steps = config.cluster, config.train.gradient_accumulation_steps
    samples = config.train.micro_batch * steps * cluster.world_size * run.samples_per_row
    return Target(cluster.nodes, cluster.workers_per_node or 1, steps, samples)


def _own_target(run: ProfiledRun) -> Target:
    """Return the size of the profiled run itself."""
    steps = int(run.setting("train", "gradient_accumulation_steps") or 1)
    samples = (run.micro_batch_size or 1) * steps * run.workers * run.samples_per_row
    return Target(*run.size, steps, samples)


def _is_own(run: ProfiledRun, forecast: Forecast) -> bool:
    """Return whether a forecast is for the measured size, which no earlier error is about."""
    target = forecast.target
    return (target.nodes, target.workers_per_node) == run.size


def _of_others(run: ProfiledRun, forecast: Forecast, earlier: Sequence[ForecastError]) -> list[ForecastError]:
    """Return the earlier errors without that of this forecast, which must not explain itself."""
    own = subject_of(run.record, forecast.target.nodes, forecast.target.workers_per_node)
    return [error for error in earlier if error.subject != own]


def _widen(forecast: Forecast, earlier: Sequence[ForecastError]) -> Forecast:
    """Return a forecast whose interval is at least as wide as earlier errors were."""
    error = largest_expected(earlier)
    low, high = (forecast.step_time_s * factor for factor in (1 / (1 + error), 1 + error))
    return replace(forecast, low_s=min(forecast.low_s, low), high_s=max(forecast.high_s, high))


def _baseline(own: Sequence[Forecast], rows: Sequence[Forecast]) -> Baseline | None:
    """Return the fewest workers of all rows, and of the profiled run if its batch is as theirs."""
    comparable = [forecast for forecast in own if all(_same_batch(forecast, row) for row in rows)]
    first = min([*rows, *comparable], key=_by_size, default=None)
    if first is None:
        return None
    target = first.target
    return Baseline((target.nodes, target.workers_per_node), target.samples_per_step / first.step_time_s)


def _by_size(forecast: Forecast) -> tuple[int, int]:
    """Return the key by which forecasts are sorted: the workers, then the nodes."""
    return forecast.target.workers, forecast.target.nodes


def _same_batch(one: Forecast, other: Forecast) -> bool:
    """Return whether two steps have the same batch of a worker, or the same global batch."""
    a, b = one.target, other.target
    return a.micro_batches == b.micro_batches or math.isclose(a.samples_per_step, b.samples_per_step)

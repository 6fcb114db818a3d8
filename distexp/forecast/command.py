"""Output of ``distexp forecast`` for the sizes that Hydra composed."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from omegaconf import OmegaConf
from rich.table import Table
from rich.text import Text

from distexp.compose.composition import Cell
from distexp.config import ConfigError, ForecastConfig
from distexp.config.overrides import format_count
from distexp.exceptions import SweepFailedError, print_error
from distexp.forecast.communication import TO_MEASURE
from distexp.forecast.profiled_run import ProfiledRun, read_profiled_run
from distexp.forecast.size_rows import SizeRow, add_measured, forecast_sizes
from distexp.plan.command import show_predictions
from distexp.plan.plan_table import PlannedCell, plan_cells
from distexp.plan.planner import Planner, with_gpu
from distexp.plan.verdict import memory_to_fit_mib, predict
from distexp.resolve.resources import launcher_traits
from distexp.runs import predictions
from distexp.runs.disturbance import describe_disturbance
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import Predicted
from distexp.runs.run_dir import RECORD
from distexp.runs.step_files import read_ranks
from distexp.system import cgroups, files, units
from distexp.tables.columns import ALWAYS, Column, cell, fitted_table, make_console, print_plain

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
        print_error(f"the forecast is not kept for the report: {run.directory}: {error.strerror}")
    rows = add_measured(run, rows, stored)
    if options.output != "json":
        _print_table(run, rows)
        return
    print(json.dumps(files.nan_to_none([row_to_json(row) for row in rows]), indent=2))
    for line in _disturbed(run):
        print_error(line)
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


def what_if(options: ForecastConfig, profiled: RunRecord, nodes: int) -> str:
    """Return the options that make a forecast one for another machine, as typed; empty without them.

    A difference to a run without these assumptions is no error of the forecast.
    """
    found = []
    if options.preflight is not None:
        measured = None
        with suppress(ValueError):
            measured = predictions.machine_name(RunRecord.read(Path(options.preflight) / RECORD))
        if measured != predictions.machine_name(profiled):
            found.append(f"forecast.preflight={options.preflight}")
    # A record does not have its network, so each option of it is an assumption. One node has no network.
    values = {name: getattr(options, name) for name in ("network", "rail_optimized", "oversubscription") if nodes > 1}
    changed = {name: value for name, value in values.items() if value != getattr(ForecastConfig(), name)}
    return " ".join([*found, *(f"forecast.{name}={str(value).lower()}" for name, value in changed.items())])


MAX_PREDICTED_WORKERS = 64  # most workers of a size whose memory is predicted


def add_memory(rows: Sequence[SizeRow], mode: str, planner: Planner) -> list[SizeRow]:
    """Return the rows with their predicted memory. The mode is ``predict``, ``cached`` or ``off``."""
    if mode == "off":
        return list(rows)

    def reason(row: SizeRow) -> str:
        if mode == "cached" and row.cell.config is not None:
            is_cached = planner.cached(with_gpu(row.cell.config)) is not None
            return "" if is_cached else "memory was not predicted before: leave forecast.memory=cached out"
        is_small = row.workers <= MAX_PREDICTED_WORKERS
        return "" if is_small else f"memory is predicted up to {MAX_PREDICTED_WORKERS} workers only"

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


EXPOSED = "exposed_communication"

TITLES = {  # titles of the parts that may be a bottleneck: in the table, and in the answer
    "exposed_communication": ("communication", "communication that no computation hides"),
    "launch": ("slow launches", "a GPU that is idle because of slow launches"),
    "waiting": ("waiting", "waiting for the slowest worker"),
    "other": ("other work", "work that the profile does not explain"),
}

VERDICTS = {"fits": "fits", "too_close": "not certain", "does_not_fit": "does not fit"}


def answer(rows: Sequence[SizeRow], workers: str) -> str:
    """Return the sentence about the largest size; empty without a forecast. Workers are called ``GPUs`` or so."""
    row = _largest(rows)
    if row is None or row.forecast is None:
        return ""
    efficiency, (low, high) = row.efficiency or 0.0, row.efficiency_interval or (0.0, 0.0)
    count = format_count(row.workers, workers.removesuffix("s"))
    limit = f"limited by {row.forecast.limit}" if row.forecast.limit else "nothing but computation limits it"
    if row.bottleneck is not None and not row.forecast.limit:
        name, share = row.bottleneck
        limit = f"the bottleneck is {TITLES[name][1]} with {share:.0%} of the step"
    text = f"{count}: {efficiency:.0%} efficiency ({low:.0%} to {high:.0%}), {row.samples_per_second:,.1f} samples/s"
    failed = sum(1 for each in rows if each.error)
    have = f"{failed} of {format_count(len(rows), 'size')} {'has' if failed == 1 else 'have'}"
    return f"{text}; {limit}." + (f" {have} no forecast: see below." if failed else "")


def _largest(rows: Sequence[SizeRow]) -> SizeRow | None:
    """Return the forecast of the most workers; None without a forecast."""
    return max((row for row in rows if row.forecast), key=lambda row: (row.workers, row.size[0]), default=None)


def sizes_table(rows: Sequence[SizeRow], workers: str, width: int) -> list[Table | Text]:
    """Return the table with a row per size, the reasons of sizes without a forecast, and what is hidden."""
    forecast = [row for row in rows if row.forecast is not None]
    known = [column for column in _columns(forecast, workers) if set(column.cells) - {"-"}] if forecast else []
    errors = [Text(f"{_size(row)}: {row.error}", style="yellow") for row in rows if row.error]
    return [*(fitted_table(known, width, "Print them with --json.") if forecast else ()), *errors]


def _columns(rows: Sequence[SizeRow], workers: str) -> list[Column]:
    def column(title: str, read: Callable[[SizeRow], str], importance: int, *, right: bool = True) -> Column:
        return Column(title, tuple(map(read, rows)), importance, right)

    def bottleneck(row: SizeRow) -> str:
        return f"{TITLES[row.bottleneck[0]][0]} {row.bottleneck[1]:.0%}" if row.bottleneck else "-"

    def verdict(row: SizeRow) -> str:
        return VERDICTS.get((row.memory.verdict if row.memory else None) or "", "-")

    batch = column(
        "global\nbatch", lambda row: f"{row.forecast.target.samples_per_step:,.0f}" if row.forecast else "-", 92
    )
    return [
        column("nodes", lambda row: str(row.size[0]), ALWAYS),
        column("workers\nper node", lambda row: str(row.size[1]), 90),
        column(workers, lambda row: str(row.workers), 85),
        column("times the\nmeasured", lambda row: cell(row.times_the_measured, lambda times: f"{times:g}x"), 55),
        *([batch] if len(set(batch.cells)) > 1 else []),
        column("ms/step", lambda row: _ms(row.forecast.step_time_s if row.forecast else None), ALWAYS),
        column("interval", _interval, 95),
        column("samples/s", lambda row: f"{row.samples_per_second or 0:,.1f}", ALWAYS),
        column("effi-\nciency", lambda row: cell(row.efficiency, ".0%"), ALWAYS),
        column("exposed\ncommunication", lambda row: cell(row.share(EXPOSED), ".0%"), 60),
        column("bottleneck", bottleneck, 70, right=False),
        column("memory", _memory, 80),
        column("verdict", verdict, 75, right=False),
        column("J/\nsample", lambda row: cell(row.j_per_sample, units.format_amount), 65),
        column("price per\n1M samples", lambda row: cell(row.price, units.format_amount), 64),
        column("measured\nms/step", lambda row: _ms(row.measured.measured_s if row.measured else None), 98),
        column("error", lambda row: f"{row.measured.relative:+.1%}" if row.measured else "-", 97),
    ]


def _ms(seconds: float | None) -> str:
    if not seconds:
        return "-"
    return f"{1000 * seconds:,.1f}" if seconds < 10 else f"{1000 * seconds:,.0f}"


def _interval(row: SizeRow) -> str:
    return f"{_ms(row.forecast.low_s)} to {_ms(row.forecast.high_s)}" if row.forecast else "-"


def _memory(row: SizeRow) -> str:
    """Return the memory of a worker as nvidia-smi shows it, or of a node for a run on CPUs."""
    memory = row.memory or Predicted()
    mib = memory.nvidia_smi_mib or memory.host_peak_mib or memory.peak_allocated_mib
    return cell(mib, units.format_memory)


def _size(row: SizeRow) -> str:
    nodes, workers = row.size
    return f"{nodes} x {workers}"


def notes(rows: Sequence[SizeRow], workers: str, profiled_threads: int | None = None) -> Iterator[str]:
    """Yield what the rows are relative to, how far they are beyond the measured range, and what was assumed."""
    baseline = next((row.baseline for row in rows if row.baseline), None)
    if baseline is not None:
        nodes, per_node = baseline.size
        yield f"Efficiency: ideal time / real time, relative to {nodes} x {per_node} workers."
    largest, forecasts = _largest(rows), [row.forecast for row in rows if row.forecast]
    if largest is not None and largest.forecast is not None and largest.forecast.beyond:
        yield f"Beyond the measured range, {_size(largest)} {workers}: {largest.forecast.beyond}."
    # Each assumption once. The last size is the one whose measurement is proposed.
    assumed = {note.partition(TO_MEASURE)[0]: note for forecast in forecasts for note in forecast.notes}
    yield from map(_sentence, assumed.values())
    if any(row.power for row in rows):
        yield "Energy: the idle power of each GPU, and the measured energy of a micro-batch above it."
    yield from dict.fromkeys(_sentence(row.memory_error) for row in rows if row.memory_error and not row.error)
    if any(row.error.startswith("train.global_batch_size=") for row in rows):
        yield "To let the global batch grow with the workers: train.global_batch_size=null."
    limits = (row.memory.host_memory_mib for row in rows if row.memory and row.size[0] > 1)
    if limit := next(filter(None, limits), None):
        yield f"Memory and verdict: of one node. Assumed: each node has {units.format_memory(limit)}."
    yield from _cpu_notes(rows, profiled_threads)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def _cpu_notes(rows: Sequence[SizeRow], profiled_threads: int | None) -> Iterator[str]:
    """Yield warnings if CPU workers have other numbers of threads at some sizes, or too few cores on this machine."""
    found = [row.cell.config for row in rows if row.forecast and row.cell.config is not None]
    configs = [config for config in found if config.cluster.device == "cpu"]
    threads = {config.cluster.cpus_per_worker for config in configs}
    if threads and len(threads | ({profiled_threads} - {None})) > 1:
        yield "On CPUs a worker has another number of threads at some sizes. A forecast assumes that of the profile."
    local = [config for config in configs if launcher_traits(config).runs_here]
    most, cores = max((config.cluster.world_size for config in local), default=0), cgroups.cpu_count()
    if most > cores:
        machine = f"This machine has {format_count(cores, 'CPU core')}."
        yield f"{machine} A forecast assumes a core for each worker. So a run with {most} workers is slower here."

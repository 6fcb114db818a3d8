"""What ``distexp forecast`` prints: a sentence, a row for each size, and what was assumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from distexp.config.overrides import format_count
from distexp.forecast.communication import TO_MEASURE
from distexp.forecast.size_rows import SizeRow
from distexp.resolve.resources import launcher_traits
from distexp.runs.record_sections import Predicted
from distexp.runs.step_files import PARTS
from distexp.system.cgroups import cpu_count
from distexp.system.units import format_amount, format_memory
from distexp.tables.columns import ALWAYS, Column, cell, fitted_table

EXPOSED = "exposed_communication"

TITLES: Mapping[str, str] = {  # short titles of parts
    "exposed_communication": "communication",
    "launch": "slow launches",
    "waiting": "waiting",
    "other": "other work",
}

LONG_TITLES: Mapping[str, str] = {  # titles of parts in the answer
    "exposed_communication": "communication that no computation hides",
    "launch": "a GPU that is idle because of slow launches",
    "waiting": "waiting for the slowest worker",
    "other": "work that the profile does not explain",
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
        limit = f"the bottleneck is {LONG_TITLES.get(name) or part_title(name)} with {share:.0%} of the step"
    text = f"{count}: {efficiency:.0%} efficiency ({low:.0%} to {high:.0%}), {row.samples_per_second:,.1f} samples/s"
    failed = sum(1 for each in rows if each.error)
    have = f"{failed} of {format_count(len(rows), 'size')} {'has' if failed == 1 else 'have'}"
    return f"{text}; {limit}." + (f" {have} no forecast: see below." if failed else "")


def _largest(rows: Sequence[SizeRow]) -> SizeRow | None:
    """Return the forecast of the most workers; None without a forecast."""
    return max((row for row in rows if row.forecast), key=lambda row: (row.workers, row.size[0]), default=None)


def part_title(name: str) -> str:
    """Return the short title of a part."""
    return TITLES.get(name) or PARTS.get(name) or name.replace("_", " ")


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
        return f"{part_title(row.bottleneck[0])} {row.bottleneck[1]:.0%}" if row.bottleneck else "-"

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
        column("J/\nsample", lambda row: cell(row.j_per_sample, format_amount), 65),
        column("price per\n1M samples", lambda row: cell(row.price, format_amount), 64),
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
    return cell(mib, format_memory)


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
        yield f"Memory and verdict: of one node. Assumed: each node has {format_memory(limit)}."
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
    most, cores = max((config.cluster.world_size for config in local), default=0), cpu_count()
    if most > cores:
        machine = f"This machine has {format_count(cores, 'CPU core')}."
        yield f"{machine} A forecast assumes a core for each worker. So a run with {most} workers is slower here."

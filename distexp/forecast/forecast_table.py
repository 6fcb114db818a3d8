"""What ``distexp forecast`` prints: a sentence, a row for each size, and what was assumed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

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

TITLES: Mapping[str, str] = {
    "exposed_communication": "communication",
    "launch": "slow launches",
    "waiting": "waiting",
    "other": "other work",
}
"""Short titles of parts."""

LONG_TITLES: Mapping[str, str] = {
    "exposed_communication": "communication that no computation hides",
    "launch": "a GPU that is idle because of slow launches",
    "waiting": "waiting for the slowest worker",
    "other": "work that the profile does not explain",
}
"""Titles of parts in the answer."""

VERDICTS = {"fits": "fits", "too_close": "not certain", "does_not_fit": "does not fit"}


def answer(rows: Sequence[SizeRow], workers: str) -> str:
    """Return the sentence about the largest size; empty without a forecast."""
    row = _largest(rows)
    if row is None or row.forecast is None:
        return ""
    efficiency, (low, high) = row.efficiency or 0.0, row.efficiency_interval or (0.0, 0.0)
    count = format_count(row.workers, workers.removesuffix("s"))
    text = f"{count}: {efficiency:.0%} efficiency ({low:.0%} to {high:.0%}), {row.samples_per_second:,.1f} samples/s"
    return f"{text}; {_limit(row)}.{_impossible(rows)}"


def _impossible(rows: Sequence[SizeRow]) -> str:
    """Return how many sizes have no forecast; empty if all have one."""
    count = sum(1 for row in rows if row.error)
    if not count:
        return ""
    return f" {count} of {format_count(len(rows), 'size')} {'has' if count == 1 else 'have'} no forecast: see below."


def _largest(rows: Sequence[SizeRow]) -> SizeRow | None:
    """Return the forecast of the most workers; None without a forecast."""
    return max((row for row in rows if row.forecast), key=_by_size, default=None)


def _by_size(row: SizeRow) -> tuple[int, int]:
    """Return the key by which sizes are sorted: the workers, then the nodes."""
    return row.workers, row.size[0]


def _limit(row: SizeRow) -> str:
    """Return what limits a size."""
    if row.forecast is not None and row.forecast.limit:
        return f"limited by {row.forecast.limit}"
    if row.bottleneck is None:
        return "nothing but computation limits it"
    name, share = row.bottleneck
    return f"the bottleneck is {LONG_TITLES.get(name) or part_title(name)} with {share:.0%} of the step"


def part_title(name: str) -> str:
    """Return the short title of a part."""
    return TITLES.get(name) or PARTS.get(name) or name.replace("_", " ")


def sizes_table(rows: Sequence[SizeRow], workers: str, width: int) -> list[Table | Text]:
    """Return the table with a row per size, the reasons of sizes without a forecast, and what is hidden."""
    found: list[Table | Text] = []
    forecast = [row for row in rows if row.forecast is not None]
    if forecast:
        found += fitted_table(_known(_columns(forecast, workers)), width, "Print them with --json.")
    found += [Text(f"{_size(row)}: {row.error}", style="yellow") for row in rows if row.error]
    return found


def _columns(rows: Sequence[SizeRow], workers: str) -> list[Column]:
    def column(title: str, read: Callable[[SizeRow], str], importance: int, *, right: bool = True) -> Column:
        return Column(title, tuple(map(read, rows)), importance, right)

    return [
        column("nodes", lambda row: str(row.size[0]), ALWAYS),
        column("workers\nper node", lambda row: str(row.size[1]), 90),
        column(workers, lambda row: str(row.workers), 85),
        column("times the\nmeasured", _times, 55),
        *_global_batch(rows),
        column("ms/step", lambda row: _ms(row.forecast.step_time_s if row.forecast else None), ALWAYS),
        column("interval", _interval, 95),
        column("samples/s", lambda row: f"{row.samples_per_second or 0:,.1f}", ALWAYS),
        column("effi-\nciency", lambda row: cell(row.efficiency, ".0%"), ALWAYS),
        column("exposed\ncommunication", lambda row: cell(row.share(EXPOSED), ".0%"), 60),
        column("bottleneck", _bottleneck, 70, right=False),
        column("memory", _memory, 80),
        column("verdict", _verdict, 75, right=False),
        column("J/\nsample", lambda row: cell(row.j_per_sample, format_amount), 65),
        column("price per\n1M samples", lambda row: cell(row.price, format_amount), 64),
        column("measured\nms/step", lambda row: _ms(row.measured.measured_s if row.measured else None), 98),
        column("error", lambda row: f"{row.measured.relative:+.1%}" if row.measured else "-", 97),
    ]


def _global_batch(rows: Sequence[SizeRow]) -> list[Column]:
    """Return the column of the global batch, if it is not the same at all sizes."""
    cells = tuple(f"{row.forecast.target.samples_per_step:,.0f}" if row.forecast else "-" for row in rows)
    return [Column("global\nbatch", cells, 92, True)] if len(set(cells)) > 1 else []


def _known(columns: Sequence[Column]) -> list[Column]:
    """Return the columns that have a value."""
    return [column for column in columns if set(column.cells) - {"-"}]


def _ms(seconds: float | None) -> str:
    if not seconds:
        return "-"
    return f"{1000 * seconds:,.1f}" if seconds < 10 else f"{1000 * seconds:,.0f}"


def _times(row: SizeRow) -> str:
    return "-" if row.profiled_workers is None else f"{row.workers / row.profiled_workers:g}x"


def _interval(row: SizeRow) -> str:
    return f"{_ms(row.forecast.low_s)} to {_ms(row.forecast.high_s)}" if row.forecast else "-"


def _bottleneck(row: SizeRow) -> str:
    if row.bottleneck is None:
        return "-"
    name, share = row.bottleneck
    return f"{part_title(name)} {share:.0%}"


def _memory(row: SizeRow) -> str:
    """Return the memory of a worker as nvidia-smi shows it, or of a node for a run on CPUs."""
    memory = row.memory or Predicted()
    mib = memory.nvidia_smi_mib or memory.host_peak_mib or memory.peak_allocated_mib
    return cell(mib, format_memory)


def _verdict(row: SizeRow) -> str:
    return VERDICTS.get((row.memory.verdict if row.memory else None) or "", "-")


def _size(row: SizeRow) -> str:
    nodes, workers = row.size
    return f"{nodes} x {workers}"


def _distinct(texts: Iterable[str]) -> Iterator[str]:
    """Yield each assumption once. The last size is the one whose measurement is proposed."""
    yield from {text.partition(TO_MEASURE)[0]: text for text in texts}.values()


def notes(rows: Sequence[SizeRow], workers: str, profiled_threads: int | None = None) -> Iterator[str]:
    """Yield what the rows are relative to, how far they are beyond the measured range, and what was assumed."""
    baseline = next((row.baseline for row in rows if row.baseline), None)
    if baseline is not None:
        nodes, per_node = baseline.size
        yield f"Efficiency: ideal time / real time, relative to {nodes} x {per_node} workers."
    yield from _beyond(rows, workers)
    forecasts = [row.forecast for row in rows if row.forecast]
    yield from map(_sentence, _distinct(note for forecast in forecasts for note in forecast.notes))
    if any(row.power for row in rows):
        yield "Energy: the idle power of each GPU, and the measured energy of a micro-batch above it."
    yield from dict.fromkeys(_sentence(row.memory_error) for row in rows if row.memory_error and not row.error)
    yield from _fixed_batch(rows)
    yield from _node_memory(rows)
    yield from _threads(rows, profiled_threads)
    yield from _cores(rows)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def _beyond(rows: Sequence[SizeRow], workers: str) -> Iterator[str]:
    """Yield how far the largest size is beyond the measured range."""
    row = _largest(rows)
    if row is not None and row.forecast is not None and row.forecast.beyond:
        yield f"Beyond the measured range, {_size(row)} {workers}: {row.forecast.beyond}."


def _fixed_batch(rows: Sequence[SizeRow]) -> Iterator[str]:
    """Yield how to forecast sizes that cannot share the global batch."""
    if any(row.error.startswith("train.global_batch_size=") for row in rows):
        yield "To let the global batch grow with the workers: train.global_batch_size=null."


def _node_memory(rows: Sequence[SizeRow]) -> Iterator[str]:
    """Yield which memory the verdict of several nodes on CPUs is about."""
    for row in rows:
        limit = row.memory.host_memory_mib if row.memory else None
        if limit and row.size[0] > 1:
            yield f"Memory and verdict: of one node. Assumed: each node has {format_memory(limit)}."
            return


def _threads(rows: Sequence[SizeRow], profiled_threads: int | None) -> Iterator[str]:
    """Yield a warning if CPU workers of the sizes have other numbers of threads than those of the profiled run."""
    configs = [row.cell.config for row in rows if row.forecast and row.cell.config is not None]
    threads = {config.cluster.cpus_per_worker for config in configs if config.cluster.device == "cpu"}
    if threads and len(threads | ({profiled_threads} - {None})) > 1:
        yield "On CPUs a worker has another number of threads at some sizes. A forecast assumes that of the profile."


def _cores(rows: Sequence[SizeRow]) -> Iterator[str]:
    """Yield a warning if this machine has fewer CPU cores than a size has local workers."""
    configs = [row.cell.config for row in rows if row.forecast and row.cell.config is not None]
    local = [config for config in configs if config.cluster.device == "cpu" and launcher_traits(config).runs_here]
    most, cores = max((config.cluster.world_size for config in local), default=0), cpu_count()
    if most > cores:
        machine = f"This machine has {format_count(cores, 'CPU core')}."
        yield f"{machine} A forecast assumes a core for each worker. So a run with {most} workers is slower here."

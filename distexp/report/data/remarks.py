"""Sentences about the runs of a report: disturbances, slow ranks, energy and scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from distexp.config.overrides import format_count
from distexp.report.data.metrics import METRICS_BY_NAME
from distexp.report.data.overview import DISTURBED_MARK, Overview
from distexp.report.data.repeats import RunGroup
from distexp.report.data.rows import Row, name_runs
from distexp.report.data.run_settings import WORKERS
from distexp.report.data.scaling_series import groups_without_baseline, threads_per_worker
from distexp.runs.attempts import earlier_records
from distexp.runs.texts import describe_straggler
from distexp.system.typed_values import number_of
from distexp.system.units import format_amount, format_kwh

MAX_DISTURBED = 4
MARK_NOTE = "This run, or the run it is compared with, was slowed down by another program. Such speeds are not ranked."
MAX_STRAGGLERS = 8
RETRIES = METRICS_BY_NAME["torch_alloc_retries"].name
MAX_DOUBTS = 2


def describe_disturbances(overview: Overview) -> Iterator[str]:
    """Yield each such run with what shows it, and what the report does not conclude from it."""
    found = list(_disturbed_runs(overview))
    yield from found[:MAX_DISTURBED]
    if (more := len(found) - MAX_DISTURBED) > 0:
        yield f"{more} more {'was' if more == 1 else 'were'} disturbed."
    large = [group.label for group in overview.groups if overview.exceeds_workers(group)]
    if large and overview.baseline is not None and not overview.baseline.disturbance:
        their = "its number" if len(large) == 1 else "their number"
        start = f"{DISTURBED_MARK}: The speedup of {name_runs(large)} is larger than {their} of workers."
        yield f"{start} Do not trust the baseline, {overview.describe(overview.baseline)}."
        yield explain_slow_baseline(overview.baseline)
    if any(group.disturbance for group in overview.groups):
        yield f"{DISTURBED_MARK}: {MARK_NOTE}"
        yield "Repeat these runs when no other program needs the machine."


def _disturbed_runs(overview: Overview) -> Iterator[str]:
    for group in overview.groups:
        if reason := group.disturbance:
            yield f"R{overview.describe(group)[1:]} was disturbed: {reason}."
            continue
        for row in group.counted_rows:
            if row.disturbance:
                label = f"R{overview.describe(group, row.label)[1:]}"
                yield f"{label} was disturbed: {row.disturbance}. Its speed does not count, that of its repeats does."


def describe_stragglers(rows: Sequence[Row]) -> Iterator[str]:
    """Yield each such rank with the evidence, and the number of those that are left out."""
    found = [(row, entry) for row in rows for entry in row.record.metrics.stragglers or ()]
    for row, entry in found[:MAX_STRAGGLERS]:
        text = describe_straggler(entry)
        yield f"In run {row.label}, {text[0].lower()}{text[1:].rstrip('.')}."
    if len(found) > MAX_STRAGGLERS:
        yield f"{format_count(len(found) - MAX_STRAGGLERS, 'more slow rank')} are in the records."


TOTALS: dict[str, Callable[[float], str]] = {  # keys of `metrics.energy` that are sums over runs, with their formats
    "kwh": format_kwh,
    "gpu_hours": lambda value: f"{format_amount(value)} GPU-hours",
    "co2e_g": lambda value: f"{format_amount(value)} g CO2e",
    "price": lambda value: f"price {value:,.2f}",
}


def energy_totals(rows: Sequence[Row]) -> Iterator[str]:
    """Yield each sum over the runs that started, for example ``1.25 kWh``, or ``1.25 kWh (2 of 3 runs)``.

    Earlier attempts of a run count too. Then the sums are ``1.25 kWh (4 attempts)`` or ``(3 of 4 attempts)``.
    """
    attempts = [_energies_of_attempts(row) for row in rows if row.record.status != "invalid"]
    energies = [energy for energies_of_run in attempts for energy in energies_of_run]
    repeated = len(energies) > len(attempts)
    noun = "attempts" if repeated else "runs"
    for key, text in TOTALS.items():
        values = [value for energy in energies if (value := number_of(energy, key)) is not None]
        if values:
            complete = len(values) == len(energies)
            count = f"{len(values)} {noun}" if complete else f"{len(values)} of {len(energies)} {noun}"
            yield text(sum(values)) + (f" ({count})" if repeated or not complete else "")


def _energies_of_attempts(row: Row) -> list[Mapping[str, Any]]:
    earlier = earlier_records(row.path.parent) if row.path else []
    known = [record.metrics.energy or {} for record in [row.record, *earlier]]
    return [*known, *[{}] * (len(row.record.run.attempts) - len(known))]


def remark_on_scaling(overview: Overview) -> Iterator[str]:
    """Yield what restricts the use of the efficiencies."""
    for series in [series for series in overview.series if not series.is_trusted][:MAX_DOUBTS]:
        best, group = max(point.efficiency for point in series.points), series.baseline.group
        above = f"Efficiency {best:.0%} is above 100%: do not trust the baseline, run {group.label}."
        yield f"{above} {explain_slow_baseline(group)}"
    if without := groups_without_baseline(overview.groups, overview.varied):
        threads = sorted({threads_per_worker(group) or 0 for group in without})
        labels, here = name_runs(group.label for group in without), f"here ({', '.join(map(str, threads))})"
        yield (
            f"No efficiency for {labels}: other runs have another number of threads per worker than {here}. "
            f"To compare them, set cluster.cpus_per_worker={threads[0]} for all runs."
        )
    crowded = [(group, cores) for group in overview.groups if (cores := _too_few_cores(group))]
    if crowded:
        labels = name_runs(group.label for group, _ in crowded)
        group, cores = crowded[-1]
        yield f"More workers than CPU cores in {labels} (for example {group.setting(WORKERS)} on {cores})."
        yield "Workers that share a core do not show scaling."


def explain_slow_baseline(group: RunGroup) -> str:
    """Return the likely reason why a baseline was slow, with a hint."""
    retries, threads = group.metric(RETRIES), threads_per_worker(group) or 1
    if retries and retries.mean > 0:
        return "Likely reason: its GPU memory was nearly full. Lower train.micro_batch_size."
    if threads > 1:
        return f"Likely reason: its {threads} threads per worker wait on busy cores. Set cluster.cpus_per_worker=1."
    if group.setting("device") == "cpu":
        return "Likely reason: other programs used its cores. Repeat with repeats=3."
    return "Likely reason: something else slowed it down. Repeat with repeats=3."


def _too_few_cores(group: RunGroup) -> int | None:
    """Return the cores of the machines of a CPU run, if it has more workers than these."""
    record = group.counted_rows[0].record
    cores = record.environment.cpu_count if record.environment else None
    if not group.completed or group.setting("device") != "cpu" or not cores:
        return None
    total = cores * max(1, len(set(record.run.hosts)))
    return total if int(group.setting(WORKERS) or 0) > total else None

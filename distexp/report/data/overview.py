"""Comparison of runs: repeats, varying settings, baseline, scaling series, rankings, and reasons of failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

from distexp.config.overrides import format_count
from distexp.report.data.metrics import (
    COST,
    CPU_PEAK,
    EFFICIENCY,
    MEMORIES,
    METRICS_BY_NAME,
    NOISE,
    SPEED,
    SPEEDUP,
    TABLE_METRICS,
    Metric,
)
from distexp.report.data.repeats import EQUAL, RunGroup, collect, group_repeats, share_deviations, varying_settings
from distexp.report.data.rows import (
    MAX_LENGTH,
    SEED,
    WORKERS,
    Row,
    format_noise,
    format_setting,
    format_settings,
    name_runs,
    rows_from_records,
    run_label,
)
from distexp.report.data.scaling_series import (
    ScalingSeries,
    add_efficiency,
    add_speedup,
    exceeds_workers,
    find_scaling_series,
    groups_without_baseline,
    threads_per_worker,
)
from distexp.runs.attempts import earlier_records
from distexp.runs.record import RunRecord
from distexp.runs.texts import describe_straggler, memory_lines, shorten_message
from distexp.statistics.noise import CPU_MEMORY_MIB, Spread, is_within_noise
from distexp.system.typed_values import OTHER_MIB, device_values, number_of
from distexp.system.units import format_amount, format_kwh

MAX_SETTINGS = 4  # in a description of a run
NOISE_MARK = "~"
DISTURBED_MARK = "!"
MAX_REASON_LENGTH = 300  # characters of a message
MAX_LABELS = 8


@dataclass(frozen=True)
class Overview:
    """A comparison of runs: their groups, the settings that vary, the baseline of speedups, and the scaling series."""

    rows: tuple[Row, ...]
    groups: tuple[RunGroup, ...]
    varied: tuple[str, ...]
    baseline: RunGroup | None
    series: tuple[ScalingSeries, ...]

    @classmethod
    def from_rows(cls, rows: Sequence[Row]) -> Overview:
        """Group and compare rows, and fill in their speedups and efficiencies."""
        groups = share_deviations(group_repeats(rows))
        for group in groups:
            speed = group.metric(SPEED)
            for row in group.counted_rows:
                row.metrics[NOISE] = 100 * speed.noise / speed.mean if speed and speed.noise and speed.mean else None
        varied = varying_settings([row.record for row in rows], [row.settings for row in rows])
        if any(len({row.settings.get(SEED) for row in group.rows}) > 1 for group in groups):
            varied = [name for name in varied if name != SEED]
        series = find_scaling_series(groups, varied)
        add_efficiency(series)
        return cls(tuple(rows), tuple(groups), tuple(varied), add_speedup(groups), tuple(series))

    @classmethod
    def from_records(cls, records: Sequence[RunRecord]) -> Overview:
        """Compare records in memory."""
        return cls.from_rows(rows_from_records(records))

    def metrics(self) -> Iterator[Metric]:
        """Yield the metrics for tables that any run has."""
        for metric in TABLE_METRICS:
            values = [value for row in self.rows if (value := row.metrics[metric.name]) is not None]
            if any(values) if metric.hides_zero else values:
                yield metric

    def describe(self, group: RunGroup, number: str = "") -> str:
        """Return the label of a training, or of one of its repeats; without settings if too many vary."""
        return run_label(number or group.label, self.format_settings(group))

    def format_settings(self, group: RunGroup) -> str:
        """Return ``strategy=fsdp, offload=true``; empty if too many settings vary."""
        names = [name for name in self.varied if group.setting(name) is not None]
        return format_settings(group.settings, names) if len(names) <= MAX_SETTINGS else ""

    def equals_baseline(self, group: RunGroup) -> bool:
        """Return whether the speed of another group equals that of the baseline within the noise."""
        if self.baseline is None or group is self.baseline or group.task != self.baseline.task:
            return False
        speed, other = group.metric(SPEED), self.baseline.metric(SPEED)
        return bool(group.completed and speed and other and is_within_noise(speed, other))

    def exceeds_workers(self, group: RunGroup) -> bool:
        """Return whether the number of workers does not explain a speedup."""
        return self.baseline is not None and group.completed and exceeds_workers(group, self.baseline, self.varied)

    def label_columns(self, labels: Sequence[str], groups: Sequence[RunGroup]) -> dict[str, list[str]]:
        """Return the first columns of a table: the runs, and their settings that vary."""
        settings = {name: [format_setting(group.setting(name), MAX_LENGTH) for group in groups] for name in self.varied}
        return {"run": list(labels), **settings}

    def mark(self, metric: str, group: RunGroup) -> str:
        """Return the mark behind a metric of a run: it was disturbed, or equals the baseline within the noise."""
        is_speedup = metric == SPEEDUP
        if any(one.disturbance for one in self._groups_of_metric(metric, group)):
            return DISTURBED_MARK
        if is_speedup and self.exceeds_workers(group):
            return DISTURBED_MARK
        return NOISE_MARK if is_speedup and self.equals_baseline(group) else ""

    def cell(self, metric: str, group: RunGroup, shown: str) -> str:
        """Return a cell of a table. A ratio that may not be ranked is replaced by its mark."""
        mark = self.mark(metric, group)
        if mark and metric in (SPEEDUP, EFFICIENCY):
            return EQUAL if mark == NOISE_MARK else mark
        return shown + mark

    def _groups_of_metric(self, metric: str, group: RunGroup) -> Iterator[RunGroup]:
        """Yield the groups whose speeds make a metric: none, its own, and that of a baseline."""
        if group.metric(metric) is None or metric not in (SPEED, SPEEDUP, EFFICIENCY):
            return
        yield group
        if metric == SPEEDUP and self.baseline is not None:
            yield self.baseline
        if metric == EFFICIENCY:
            yield from (one.baseline.group for one in self.series if any(point.group is group for point in one.points))


@dataclass(frozen=True)
class RankedGroup:
    """A training with the value of the metric by which it is ranked."""

    group: RunGroup
    value: Spread


@dataclass(frozen=True)
class Ranking:
    """The trainings of a task, the best first."""

    task: str
    ranked: tuple[RankedGroup, ...]
    metric: str

    @property
    def best(self) -> RankedGroup:
        """Return the first training."""
        return self.ranked[0]

    @property
    def equal_to_best(self) -> tuple[RankedGroup, ...]:
        """Return the trainings after the best one that differ from it by less than the noise."""
        return tuple(other for other in self.ranked[1:] if is_within_noise(self.best.value, other.value))

    def why_equal(self, noise: float) -> str:
        """Return why runs with this noise of their difference are not ranked, as the end of a sentence."""
        least = self.best.group.least_cpu_mib
        if self.metric == CPU_PEAK and least > CPU_MEMORY_MIB and noise <= 1.001 * sqrt(2) * least:
            return f"differ by less than the {sqrt(2) * least:,.0f} MiB that their processes need without tensors"
        return f"are equal within the noise of {format_noise(noise, self.best.value.mean)}"


def memory_metric(overview: Overview) -> str | None:
    """Return the first metric of ``MEMORIES`` that a completed run has; None if there is none."""
    done = [row for row in overview.rows if row.completed]
    return next((name for name in MEMORIES if any(row.metrics[name] is not None for row in done)), None)


def group_by_task(groups: Sequence[RunGroup]) -> dict[str, list[RunGroup]]:
    """Collect groups by task. Runs of different tasks (model and data set) are not comparable."""
    return collect(groups, lambda group: group.task)


def rank_by_metric(overview: Overview, name: str, *, largest: bool) -> Iterator[Ranking]:
    """Yield a ranking of each task: its completed groups that have the metric. Disturbed ones have no known speed."""
    completed = [group for group in overview.groups if group.completed and group.metric(name)]
    known = [group for group in completed if name not in (SPEED, COST) or group.disturbance is None]
    for task, groups in group_by_task(known).items():
        ranked = [RankedGroup(group, value) for group in groups if (value := group.metric(name))]
        yield Ranking(task, tuple(sorted(ranked, key=lambda one: one.value.mean, reverse=largest)), name)


def pareto_fronts(overview: Overview, cost: str) -> list[list[RunGroup]]:
    """Return the Pareto front of each task: no other group is both cheaper and faster. The cheapest comes first.

    A difference within the noise does not count. Of two runs with equal speeds only the cheaper one is on the front.
    Disturbed runs are left out. The cost is a metric.
    """
    measured = [group for group in overview.groups if group.completed and group.metric(cost) and group.metric(SPEED)]
    known = [group for group in measured if group.disturbance is None]
    return [_pareto_front(groups, cost) for groups in group_by_task(known).values()]


class _Point(NamedTuple):
    group: RunGroup
    cost: Spread
    speed: Spread

    def dominates(self, other: _Point) -> bool:
        """Return whether this point is better in cost or speed, and not worse in the other one."""
        cheaper, faster = _order(other.cost, self.cost), _order(self.speed, other.speed)
        return cheaper >= 0 and faster >= 0 and cheaper + faster > 0


def _pareto_front(groups: Sequence[RunGroup], cost: str) -> list[RunGroup]:
    measured = ((group, group.metric(cost), group.metric(SPEED)) for group in groups)
    points = [_Point(group, size, speed) for group, size, speed in measured if size and speed]
    front: list[_Point] = []
    for point in sorted(points, key=lambda point: (point.cost.mean, -point.speed.mean)):
        if not front or _order(point.speed, front[-1].speed) > 0:
            front.append(point)
    return [point.group for point in front if not any(other.dominates(point) for other in front)]


def _order(one: Spread, other: Spread) -> int:
    """Return 1 if the first value is larger, -1 if it is smaller, 0 if they are equal within the noise."""
    if one.mean == other.mean or is_within_noise(one, other):
        return 0
    return 1 if one.mean > other.mean else -1


def failure_notes(rows: Sequence[Row]) -> Iterator[str]:
    """Yield one line for each reason, with the runs that share it."""
    labels: dict[str, list[str]] = {}
    for row in rows:
        for reason in () if row.completed else failure_reasons(row):
            labels.setdefault(f"{row.record.status}: {reason}", []).append(row.label)
    for text, found in labels.items():
        yield f"{name_runs(found, MAX_LABELS)} {text}"


def failure_reason(row: Row, limit: int = MAX_REASON_LENGTH) -> str:
    """Return why a run did not complete, in one line."""
    return "; ".join(failure_reasons(row, limit))


def failure_reasons(row: Row, limit: int = MAX_REASON_LENGTH) -> list[str]:
    """Return why a run did not complete; an invalid run may have several reasons."""
    status, error = row.record.status, row.record.error
    if error is None:
        return ["its record has no error message"]
    if status == "invalid":
        return [" ".join(message.split()) for message in error.errors]
    phase = f" in phase {error.phase}" if error.phase else ""
    if status in ("oom_gpu", "oom_host"):
        reason = f"out of {'GPU' if status == 'oom_gpu' else 'host'} memory{phase}{_peak_memory(row)}"
        return [reason if error.memory is None else f"{reason}; {_allocation(error.memory)}"]
    message = " ".join(shorten_message(error, limit).split())
    return [f"{error.type}{phase}: {message if len(message) <= limit else message[: limit - 1] + '…'}"]


def _allocation(memory: Mapping[str, Any]) -> str:
    """Return the allocation that failed, the largest tensors and what would fit."""
    titles = {"GPU memory": "", "largest": "largest: ", "would fit": "to fit: "}
    return "; ".join(f"{titles[name]}{text}" for name, text in memory_lines(memory) if name in titles)


def _peak_memory(row: Row) -> str:
    if row.record.status == "oom_host":
        peak = row.metrics["cpu_peak_mib"]
        return "" if peak is None else f", at a peak of {peak:,.0f} MiB on a node"
    total = row.record.environment.gpu_total_mib if row.record.environment else None
    of_total = f" of {total:,.0f}" if total else ""
    own, allocated = row.metrics["gpu_peak_mib"], row.metrics["torch_peak_allocated_mib"]
    if own is not None:  # Other programs may have filled the GPU.
        peak = max(own, *device_values(row.record.memory["gpu"], "peak_mib"))
        of_run = f", {own:,.0f} of them by this run" if peak - own >= OTHER_MIB else ""
        return f", at a peak of {peak:,.0f}{of_total} MiB on a GPU{of_run}"
    return "" if allocated is None else f", at a peak of {allocated:,.0f}{of_total} MiB allocated by torch"


# Sentences about the runs of a report: disturbances, slow ranks, energy and scaling.


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

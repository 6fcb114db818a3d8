"""Remarks on scaling: baselines that are not to be trusted, missing ones, and more workers than cores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distexp.report.data.metrics import METRICS_BY_NAME
from distexp.report.data.overview import Overview
from distexp.report.data.repeats import RunGroup
from distexp.report.data.scaling import ScalingSeries, groups_without_baseline, threads_per_worker
from distexp.report.data.setting_names import WORKERS
from distexp.report.data.text import name_runs

RETRIES = METRICS_BY_NAME["torch_alloc_retries"].name
MAX_DOUBTS = 2


def remark_on_scaling(overview: Overview) -> Iterator[str]:
    """Yield what restricts the use of the efficiencies."""
    doubtful = [series for series in overview.series if not series.is_trusted]
    for series in doubtful[:MAX_DOUBTS]:
        best = max(point.efficiency for point in series.points)
        run = f"run {series.baseline.group.label}"
        yield f"Efficiency {best:.0%} is above 100%: do not trust the baseline, {run}. {explain_doubt(series)}"
    if without := groups_without_baseline(overview.groups, overview.varied):
        threads = sorted({threads_per_worker(group) or 0 for group in without})
        labels = name_runs(group.label for group in without)
        yield (
            f"No efficiency for {labels}: other runs have another number of threads per worker than here "
            f"({', '.join(map(str, threads))}). To compare them, set cluster.cpus_per_worker={threads[0]} for all runs."
        )
    yield from _more_workers_than_cores(overview.groups)


def explain_doubt(series: ScalingSeries) -> str:
    """Return the likely reason why the baseline of a series was slow, with a hint."""
    return explain_slow_baseline(series.baseline.group)


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


def _more_workers_than_cores(groups: Sequence[RunGroup]) -> Iterator[str]:
    crowded = [(group, cores) for group in groups if (cores := _too_few_cores(group))]
    if crowded:
        labels = name_runs(group.label for group, _ in crowded)
        group, cores = crowded[-1]
        yield f"More workers than CPU cores in {labels} (for example {group.setting(WORKERS)} on {cores})."
        yield "Workers that share a core do not show scaling."


def _too_few_cores(group: RunGroup) -> int | None:
    """Return the cores of the machines of a CPU run, if it has more workers than these."""
    record = group.counted_rows[0].record
    cores = record.environment.cpu_count if record.environment else None
    if not group.completed or group.setting("device") != "cpu" or not cores:
        return None
    total = cores * max(1, len(set(record.run.hosts)))
    return total if int(group.setting(WORKERS) or 0) > total else None

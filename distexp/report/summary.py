"""Sentences below the table of runs: results and warnings that the table itself cannot show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from distexp.report.data.metrics import MEMORIES, SPEED
from distexp.report.data.overview import Overview
from distexp.report.data.ranking import group_by_task, memory_metric, rank_by_metric
from distexp.report.data.repeats import RunGroup, is_within_noise
from distexp.report.data.rows import Row
from distexp.report.data.settings import global_batch
from distexp.report.data.text import name_runs
from distexp.runs.text import join_first

MOST_TASKS = 4
SAME = 0.005  # relative difference
FEW_STEPS = 5
HIGH_SETUP_PEAK = 1.25  # times the peak of all later phases


def summarize(overview: Overview) -> Iterator[str]:
    """Yield the sentences below a table of runs."""
    yield from _fastest(overview)
    yield from _smallest(overview)
    yield from _setup_peaks(overview)
    yield from _few_steps(overview)
    yield from _global_batches(overview)
    yield from _definitions(overview)
    yield from _repeats(overview)
    yield from _incomplete_runs(overview)


def _fastest(overview: Overview) -> Iterator[str]:
    yield from _best(overview, SPEED, "Fastest", "{:,.1f} samples/s", largest=True)


def _smallest(overview: Overview) -> Iterator[str]:
    name = memory_metric(overview)
    if name is not None:
        yield from _best(overview, name, f"Lowest {MEMORIES[name]}", "{:,.0f} MiB", largest=False)


def _best(overview: Overview, name: str, what: str, form: str, *, largest: bool) -> Iterator[str]:
    """Yield the best group of each task, and whether the second one is as good."""
    ranked = list(rank_by_metric(overview, name, largest=largest))[:MOST_TASKS]
    for task, groups in ranked:
        if len(groups) < 2:
            continue
        (best, value), (second, next_value) = groups[:2]
        of = f" ({task})" if len(ranked) > 1 else ""
        yield f"{what}{of}: {overview.describe(best)}, {form.format(value.mean)}."
        other = f"{overview.describe(second)}, {form.format(next_value.mean)}"
        within_noise = is_within_noise(value, next_value)
        if within_noise is not None:
            yield f"The difference to {other}, is {'within' if within_noise else 'beyond'} run-to-run noise."
        elif abs(value.mean - next_value.mean) < SAME * value.mean:
            yield f"Equal within {SAME:.1%}: {other}."


def _setup_peaks(overview: Overview) -> Iterator[str]:
    """Yield runs whose CPU memory peaked during setup, for example while DeepSpeed compiled an extension."""
    if memory_metric(overview) != "cpu_peak_mib":
        return
    for row in (row for group in overview.groups for row in group.counted_rows if row.completed):
        phases = [entry.get("phases") or {} for entry in row.record.memory.get("cpu") or []]
        setup = max((peaks.get("setup") or 0.0 for peaks in phases), default=0.0)
        later = max((peak for peaks in phases for phase, peak in peaks.items() if phase != "setup"), default=0.0)
        if later and setup > HIGH_SETUP_PEAK * later:
            yield f"Run {row.label} had its memory peak during setup. After setup its peak was {later:,.0f} MiB."
            if row.settings.get("strategy") == "deepspeed":
                yield "DeepSpeed compiles its extensions during setup if they are missing."


def _few_steps(overview: Overview) -> Iterator[str]:
    few = [
        group.label for group in overview.groups
        if group.completed and 0 < _measured_steps(group.rows[0]) < FEW_STEPS
    ]  # fmt: skip
    if few:
        yield f"Fewer than {FEW_STEPS} steps were measured in {name_runs(few)}."
        yield "For a reliable speed, raise train.max_steps or train.num_epochs."


def _measured_steps(row: Row) -> int:
    """Return the number of steps that the speed is measured over; 0 if there is no speed."""
    total, speed = row.record.metrics.total_steps, row.metrics[SPEED]
    if total is None or speed is None:
        return 0
    return total - int(row.settings.get("measure_after_step") or 0) - int(row.settings.get("profile_steps") or 0)


def _global_batches(overview: Overview) -> Iterator[str]:
    """Yield a warning for each task whose runs have different global batch sizes."""
    tasks = group_by_task([group for group in overview.groups if group.completed])
    for task, groups in list(tasks.items())[:MOST_TASKS]:
        batches = _labels_by_batch(groups)
        if len(batches) > 1:
            of = f" ({task})" if len(tasks) > 1 else ""
            sizes = join_first((f"{batch} in {name_runs(labels, 2)}" for batch, labels in batches.items()), MOST_TASKS)
            yield f"Global batch sizes differ{of}: {sizes}."
            yield "Their losses are not comparable. Make the batches equal with train.gradient_accumulation_steps."


def _labels_by_batch(groups: Sequence[RunGroup]) -> dict[int, list[str]]:
    batches: dict[int, list[str]] = {}
    for group in groups:
        if batch := global_batch(group.rows[0].settings):
            batches.setdefault(batch, []).append(group.label)
    return batches


def _definitions(overview: Overview) -> Iterator[str]:
    if overview.baseline is not None:
        several = len(group_by_task([group for group in overview.groups if group.completed])) > 1
        only = f" Only runs of {overview.baseline.task} have one." if several else ""
        yield f"Speedup: samples/s relative to {overview.describe(overview.baseline)}.{only}"
    if overview.series:
        yield "Efficiency: ideal time / real time, relative to the fewest workers of the same configuration."


def _repeats(overview: Overview) -> Iterator[str]:
    counts = [len(group.counted_rows) for group in overview.groups if group.completed]
    if any(count > 1 for count in counts):
        yield "Repeats of a training are one row (n runs): mean ± sample standard deviation."
    elif len(counts) > 1:
        yield "Each row is one run. Repeat with train.seed=1,2,3 to measure the noise."
    mixed = [group for group in overview.groups if len({row.record.run.git_sha for row in group.rows}) > 1]
    if mixed:
        yield f"These repeats ran different git commits: {join_first(map(overview.describe, mixed), 3)}."


def _incomplete_runs(overview: Overview) -> Iterator[str]:
    counts = Counter(row.record.status for row in overview.rows if not row.completed)
    if counts:
        each = ", ".join(f"{count} {status}" for status, count in counts.items())
        yield f"{sum(counts.values())} of {len(overview.rows)} runs did not complete: {each}."

"""What a table says in words, computed from its rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from distexp.report.data.metrics import MEMORIES, SPEED
from distexp.report.data.overview import Overview
from distexp.report.data.repeats import RunGroup, Spread, is_within_noise
from distexp.report.data.rows import Row
from distexp.report.data.settings import global_batch

MOST_TASKS = 4  # in sentences
SAME_MEMORY = 0.005  # relative: less than that is chance
FEW_STEPS = 5
HEAVY = 1.25  # times the peak of all other phases


def sentences(overview: Overview) -> Iterator[str]:
    """The sentences under a table."""
    yield from _fastest(overview)
    yield from _smallest(overview)
    yield from _heavy_setups(overview)
    yield from _few_steps(overview)
    yield from _batches(overview)
    yield from _scaling(overview)
    yield from _repeats(overview)
    yield from _outcomes(overview)


def memory_figure(overview: Overview) -> str | None:
    """The figure that stands for memory here: the first of MEMORIES that a completed run has."""
    done = [row for row in overview.rows if row.completed]
    return next((name for name in MEMORIES if any(row.metrics[name] is not None for row in done)), None)


def pareto_fronts(overview: Overview, memory: str) -> list[tuple[list[RunGroup], int]]:
    """For each model on its data, what no other training beats in both memory and speed, and of how many.

    The smallest stands first.
    """
    known = [group for group in overview.groups if group.completed and group.metric(memory) and group.metric(SPEED)]
    return [(_front(groups, memory), len(groups)) for groups in _by_task(known).values()]


def _by_task(groups: Sequence[RunGroup]) -> dict[str, list[RunGroup]]:
    tasks: dict[str, list[RunGroup]] = {}
    for group in groups:
        tasks.setdefault(group.task, []).append(group)
    return tasks


def _front(groups: Sequence[RunGroup], memory: str) -> list[RunGroup]:
    known = [
        (size.mean, -speed.mean, n) for n, group in enumerate(groups)
        if (size := group.metric(memory)) and (speed := group.metric(SPEED))
    ]  # fmt: skip
    front: list[RunGroup] = []
    best = math.inf
    for _, slowness, n in sorted(known):
        if slowness < best:
            best = slowness
            front.append(groups[n])
    return front


def _rankings(overview: Overview, name: str, *, largest: bool) -> Iterator[tuple[str, list[tuple[RunGroup, Spread]]]]:
    """The groups of each task from the best on, and how the task is called where there are several."""
    tasks = _by_task([group for group in overview.groups if group.completed and group.metric(name)])
    for task, groups in list(tasks.items())[:MOST_TASKS]:
        known = [(group, figure) for group in groups if (figure := group.metric(name))]
        if len(known) > 1:
            ranked = sorted(known, key=lambda pair: pair[1].mean, reverse=largest)
            yield f" ({task})" if len(tasks) > 1 else "", ranked


def _fastest(overview: Overview) -> Iterator[str]:
    for of, ranked in _rankings(overview, SPEED, largest=True):
        (best, speed), (second, next_speed) = ranked[:2]
        ratio = f"{speed.mean / next_speed.mean:.2f}" if next_speed.mean else ""
        gain = "as fast as" if ratio == "1.00" else f"{ratio}x of" if ratio else "against 0 for"
        yield (
            f"Fastest{of}: {overview.describe(best)} with {speed.mean:,.1f} samples/s, {gain} "
            f"{overview.describe(second)}{_chance(speed, next_speed)}."
        )


def _smallest(overview: Overview) -> Iterator[str]:
    name = memory_figure(overview)
    if name is None:
        return
    for of, ranked in _rankings(overview, name, largest=False):
        (best, memory), (second, next_memory) = ranked[:2]
        if next_memory.mean - memory.mean < SAME_MEMORY * memory.mean:
            both = f"{overview.describe(best)} and {overview.describe(second)}"
            yield f"Smallest {MEMORIES[name]}{of}: {both} with {memory.mean:,.0f} and {next_memory.mean:,.0f} MiB."
            continue
        yield (
            f"Smallest {MEMORIES[name]}{of}: {overview.describe(best)} with {memory.mean:,.0f} MiB, against "
            f"{next_memory.mean:,.0f} MiB of {overview.describe(second)}{_chance(memory, next_memory)}."
        )


def _heavy_setups(overview: Overview) -> Iterator[str]:
    """Where memory on the CPU was at its peak before the training, as while DeepSpeed compiles a part of itself."""
    if memory_figure(overview) != "cpu_peak_mib":
        return
    for row in (row for group in overview.groups for row in group.counted_rows if row.completed):
        phases = [entry.get("phases") or {} for entry in row.record.memory.get("cpu") or []]
        before = max((peaks.get("setup") or 0.0 for peaks in phases), default=0.0)
        after = max((peak for peaks in phases for phase, peak in peaks.items() if phase != "setup"), default=0.0)
        if after and before > HEAVY * after:
            compiled = ": DeepSpeed compiles a part of itself where that is missing" if _is_deepspeed(row) else ""
            yield f"Run {row.label} was at its peak during setup, and at {after:,.0f} MiB at most after it{compiled}."


def _is_deepspeed(row: Row) -> bool:
    return bool(row.settings.get("strategy") == "deepspeed")


def _few_steps(overview: Overview) -> Iterator[str]:
    """Which speeds are of so few steps that the next run may have others."""
    few = [group.label for group in overview.groups if group.completed and 0 < _measured(group.rows[0]) < FEW_STEPS]
    if few:
        yield (
            f"The speed of run {_few(few)} is that of fewer than {FEW_STEPS} steps: raise train.max_steps or "
            "train.num_epochs for one that holds."
        )


def _measured(row: Row) -> int:
    """Steps that a speed comes from; 0 where there is none."""
    total, figure = row.record.metrics.total_steps, row.metrics[SPEED]
    if total is None or figure is None:
        return 0
    return total - int(row.settings.get("measure_after_step") or 0) - int(row.settings.get("profile_steps") or 0)


def _batches(overview: Overview) -> Iterator[str]:
    """Where the runs of a task are not the same training, since their steps are of different sizes."""
    tasks = _by_task([group for group in overview.groups if group.completed])
    for task, groups in list(tasks.items())[:MOST_TASKS]:
        batches: dict[int, list[str]] = {}
        for group in groups:
            if batch := global_batch(group.rows[0].settings):
                batches.setdefault(batch, []).append(group.label)
        if len(batches) > 1:
            each = "; ".join(f"{batch} in run {_few(labels)}" for batch, labels in list(batches.items())[:MOST_TASKS])
            more = "; …" if len(batches) > MOST_TASKS else ""
            of = f" of {task}" if len(tasks) > 1 else ""
            yield (
                f"Global batches{of} differ (samples a step: {each}{more}), so these are not the same training: "
                "train.gradient_accumulation_steps makes losses comparable."
            )


def _few(labels: Sequence[str]) -> str:
    return ", ".join(labels[:4]) + (f" and {len(labels) - 4} more" if len(labels) > 4 else "")


def _chance(one: Spread, other: Spread) -> str:
    """What the spread says about a difference."""
    within = is_within_noise(one, other)
    if within is None:
        return ""
    return "; the difference is within the spread" if within else "; the difference is beyond the spread"


def _scaling(overview: Overview) -> Iterator[str]:
    if overview.baseline is not None:
        tasks = _by_task([group for group in overview.groups if group.completed])
        alone = f", for runs of {overview.baseline.task}" if len(tasks) > 1 else ""
        yield f"Speedup is samples/s against {overview.describe(overview.baseline)}{alone}."
    if overview.series:
        yield "Efficiency is ideal time over real time, against the fewest workers of the same configuration."


def _repeats(overview: Overview) -> Iterator[str]:
    counts = [len(group.counted_rows) for group in overview.groups if group.completed]
    if any(count > 1 for count in counts):
        yield "n runs of the same training make one row: mean ± sample standard deviation."
    elif len(counts) > 1:
        yield "Each row is one run: repeat it (train.seed=1,2,3) to know the spread."
    mixed = [group for group in overview.groups if len({row.record.run.git_sha for row in group.rows}) > 1]
    if mixed:
        yield f"The repeats of {', '.join(overview.describe(group) for group in mixed[:3])} ran different code."


def _outcomes(overview: Overview) -> Iterator[str]:
    counts = Counter(row.record.status for row in overview.rows if not row.completed)
    if counts:
        each = ", ".join(f"{count} {status}" for status, count in counts.items())
        yield f"{sum(counts.values())} of {len(overview.rows)} runs did not complete: {each}."

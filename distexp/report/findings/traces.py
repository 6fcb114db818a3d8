"""The sentences under what is drawn over time: memory, losses, step times."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from distexp.report.data.environment_settings import is_environment_setting
from distexp.report.data.setting_names import is_strategy_option
from distexp.report.data.settings import global_batch, task_name
from distexp.report.findings.base import Finding, listed
from distexp.report.traces import RunTrace

SAME_TRAINING = "Is it the same training?"
AGREES = 1e-4  # relative; strategies that sum in another order differ by less in fp32
PLACEMENT = frozenset(
    {"strategy", "offload", "engine", "device", "nodes", "workers"}
    | {"micro_batch_size", "gradient_accumulation_steps", "eval_batch_size", "log_every", "measure_after_step"}
)
"""What distributes a training without being meant to change it, given the global batch."""


def memory_findings(traces: Sequence[RunTrace], kind: str) -> Iterator[Finding]:
    """Where the peaks are, and which node is fullest."""
    peaks = [
        (max(mib for curve in each.curves(kind) for _, mib in curve.points), each)
        for each in traces
        if each.curves(kind)
    ]
    if not peaks:
        return
    peak, highest = max(peaks, key=lambda pair: pair[0])
    when, phase = _at_peak(highest, kind)
    during = f" in phase {phase}" if phase else ""
    yield Finding(
        f"The highest peak is that of {_run(highest)}: {peak:,.0f} MiB, {when:,.1f} s after the start{during}."
    )
    low, lowest = min(peaks, key=lambda pair: pair[0])
    if lowest is not highest and low:
        yield Finding(f"The lowest is that of {_run(lowest)}: {low:,.0f} MiB, {low / peak:.0%} of that.")
    for each in traces:
        by_node = {curve.node: max(mib for _, mib in curve.points) for curve in each.curves(kind)}
        if len(by_node) > 1 and min(by_node.values()) and max(by_node.values()) > 1.1 * min(by_node.values()):
            full, empty = max(by_node, key=by_node.__getitem__), min(by_node, key=by_node.__getitem__)
            yield Finding(
                f"In {_run(each)} the nodes differ: node {full} peaks at {by_node[full]:,.0f} MiB, node {empty} at "
                f"{by_node[empty]:,.0f} MiB."
            )


def _run(traced: RunTrace) -> str:
    label = f"run {traced.row.label}"
    return label if traced.name == label else f"{label} ({traced.name})"


def _at_peak(traced: RunTrace, kind: str) -> tuple[float, str | None]:
    _, when = max((mib, second) for curve in traced.curves(kind) for second, mib in curve.points)
    return when, next((each.phase for each in traced.phases if each.begin_s <= when < each.end_s), None)


def loss_findings(traces: Sequence[RunTrace]) -> Iterator[Finding]:
    """Whether the curves of one training agree, and where it ended lowest."""
    trainings: dict[str, list[RunTrace]] = {}
    for each in traces:
        if _curve(each):
            trainings.setdefault(_training(each), []).append(each)
    tasks: dict[str, list[tuple[float, RunTrace]]] = {}
    for each in traces:
        loss = each.row.metrics["eval_loss"]
        if each.row.completed and loss is not None:
            tasks.setdefault(task_name(each.row.settings), []).append((loss, each))
    for alike in trainings.values():
        if len(alike) > 1:
            yield _agreement(alike, f" of {task_name(alike[0].row.settings)}" if len(tasks) > 1 else "")
    for task, ended in tasks.items():
        yield from _ends(ended, f" of {task}" if len(tasks) > 1 else "")


def _ends(ended: Sequence[tuple[float, RunTrace]], of: str) -> Iterator[Finding]:
    """The last losses of what trains the same model on the same data."""
    if len(ended) < 2:
        return
    (low, best), (high, worst) = min(ended, key=lambda pair: pair[0]), max(ended, key=lambda pair: pair[0])
    if f"{low:.4f}" == f"{high:.4f}":
        yield Finding(f"All {len(ended)}{of} end with an eval loss of {low:.4f}.")
    else:
        yield Finding(
            f"Lowest last eval loss{of}: {_run(best)} with {low:.4f}; highest: {_run(worst)} with {high:.4f}."
        )


def _curve(traced: RunTrace) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in traced.steps if entry.get("loss") is not None}


def _training(traced: RunTrace) -> str:
    """Equal where two runs ought to follow the same losses: same settings, but for how they are distributed."""
    settings: dict[str, Any] = {
        name: value for name, value in traced.row.settings.items()
        if name not in PLACEMENT and not is_strategy_option(name) and not is_environment_setting(name)
    }  # fmt: skip
    return json.dumps([settings, global_batch(traced.row.settings)], sort_keys=True, default=str)


def _agreement(alike: Sequence[RunTrace], of: str) -> Finding:
    """The largest distance between any two curves at a step that both have."""
    widest, where, pair = 0.0, 0, (alike[0], alike[1])
    for one, other in combinations(alike, 2):
        ours, theirs = _curve(one), _curve(other)
        for step in ours.keys() & theirs.keys():
            gap = abs(ours[step] - theirs[step]) / max(abs(ours[step]), abs(theirs[step]), 1e-12)
            if gap > widest:
                widest, where, pair = gap, step, (one, other)
    batch = global_batch(alike[0].row.settings)
    names = f"The {len(alike)} runs{of} with a global batch of {batch}" if batch else f"{len(alike)} runs{of}"
    if widest <= AGREES:
        apart = f"at most {widest:.1e} apart (relative)" if widest else "equal in every digit"
        return Finding(f"{names} follow the same losses: at each step drawn they are {apart}.", SAME_TRAINING)
    return Finding(
        f"{names} do not follow the same losses exactly: {_run(pair[0])} and {_run(pair[1])} are {widest:.2%} apart at "
        f"step {where}.", SAME_TRAINING)  # fmt: skip


def step_findings(traces: Sequence[RunTrace]) -> Iterator[Finding]:
    """Medians, tails, and waiting for data."""
    known = [(each, times) for each in traces if (times := each.row.record.metrics.step_time_s) and times.get("p50")]
    if not known:
        return
    if len(known) > 1:
        ranked = sorted(known, key=lambda pair: pair[1]["p50"])
        (fast, low), (slow, high) = ranked[0], ranked[-1]
        yield Finding(
            f"The median step takes {1000 * low['p50']:,.1f} ms in {_run(fast)} and {1000 * high['p50']:,.1f} ms in "
            f"{_run(slow)}, {high['p50'] / low['p50']:.2f}x as long."
        )
    each, times = max(known, key=lambda pair: pair[1].get("p90", 0) / pair[1]["p50"])
    if times.get("p90"):
        yield Finding(
            f"The steps vary most in {_run(each)}: one in ten takes more than {times['p90'] / times['p50']:.2f}x its "
            "median."
        )
    waits = [(wait / runtime, each) for each, _ in known for metrics in [each.row.record.metrics]
             if (wait := metrics.data_wait_s) is not None and (runtime := metrics.train_runtime)]  # fmt: skip
    if waits:
        share, worst = max(waits, key=lambda pair: pair[0])
        yield Finding(f"Waiting for data takes {share:.1%} of the runtime at most, in {_run(worst)}.")
    windows = sorted({each.row.settings.get("log_every") or 1 for each, _ in known})
    if windows != [1]:
        yield Finding(
            f"A tick is the mean of {listed(map(str, windows))} steps (train.log_every); dot and bar are of all steps."
        )

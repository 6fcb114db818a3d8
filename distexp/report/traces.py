"""Traces of runs over time: losses, step times and memory, thinned for charts."""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from distexp.report.data.metrics import MEMORIES, SPEED
from distexp.report.data.overview import Overview
from distexp.report.data.repeats import RunGroup
from distexp.report.data.rows import (
    Row,
    global_batch,
    is_environment_setting,
    is_strategy_option,
    kernel_options,
    run_label,
    task_name,
)
from distexp.report.data.step_parts import RankLanes, read_lanes
from distexp.runs.memory_trace import CPU, GPU, MemorySample, read_memory_trace
from distexp.runs.predictions import Curve, read_curve
from distexp.runs.run_dir import MEMORY, METRICS, PROFILE
from distexp.statistics.same_training import whole_training_bound
from distexp.system.files import read_entries
from distexp.system.typed_values import number_of

MAX_TRACES = 8  # more curves would need similar colors
MAX_POINTS = 240  # of a curve
TRACE = ".json.gz"

Points = list[tuple[float, float]]  # seconds since the first sample, and MiB


@dataclass(frozen=True)
class PhaseInterval:
    """A phase of a run, in seconds since the first sample."""

    phase: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class MemoryCurve:
    """Memory of a node over time: of its ``gpu`` that uses most, or of the ``cpu``."""

    node: int
    kind: str
    points: tuple[tuple[float, float], ...]  # seconds since the first sample, and MiB: peaks of intervals in a phase


@dataclass(frozen=True)
class MemoryTrace:
    """Memory of a run over time: the curves of all nodes, and the phases of the first node."""

    curves: tuple[MemoryCurve, ...] = ()
    phases: tuple[PhaseInterval, ...] = ()


@dataclass(frozen=True)
class RunTrace:
    """Traces of a training: those of one of its runs. What was not measured is empty."""

    group: RunGroup
    row: Row
    settings: str  # of the training that vary; empty if too many do
    steps: tuple[dict[str, Any], ...]  # lines of metrics.jsonl
    memory: tuple[MemoryCurve, ...] = ()
    phases: tuple[PhaseInterval, ...] = ()
    predicted: Curve = field(default_factory=dict)  # memory through a training step
    lanes: tuple[RankLanes, ...] = ()  # what each rank does in a profiled step
    profiles: tuple[Path, ...] = ()  # full traces of the profiler

    @property
    def name(self) -> str:
        """Return the label of the run in all figures."""
        return run_label(self.row.label, self.settings)

    def curves(self, kind: str) -> list[MemoryCurve]:
        """Return the curves of ``gpu`` or ``cpu`` memory, by node."""
        return [curve for curve in self.memory if curve.kind == kind]


def load_traces(overview: Overview, chosen: Sequence[str] = ()) -> list[RunTrace]:
    """Read the traces of the chosen runs, or of the most informative trainings."""
    groups = _started(overview)
    named = [group for group in groups if any(row.label in chosen for row in group.rows)]
    drawn = named if chosen else most_informative(groups)
    return [_with_curves(_read_losses(group, chosen, overview.format_settings(group), MAX_POINTS)) for group in drawn]


def _started(overview: Overview) -> list[RunGroup]:
    groups = (group for group in overview.groups if any(row.path for row in group.rows))
    return [group for group in groups if group.status != "invalid"]


def most_informative(started: Sequence[RunGroup]) -> Sequence[RunGroup]:
    """Return at most MAX_TRACES groups: the fastest, the smallest and those out of memory come first."""
    if len(started) <= MAX_TRACES:
        return started
    kept: list[RunGroup] = _ranked(started, SPEED, largest=True)[:3]
    if memory := next((name for name in MEMORIES if any(group.metric(name) for group in started)), None):
        kept += _ranked(started, memory, largest=False)[:2]
    kept += [group for group in started if "oom" in group.status][:2]
    ids = set(list(dict.fromkeys(id(group) for group in [*kept, *started]))[:MAX_TRACES])
    return [group for group in started if id(group) in ids]


def _ranked(groups: Sequence[RunGroup], name: str, *, largest: bool) -> list[RunGroup]:
    known = [(metric.mean, n) for n, group in enumerate(groups) if group.completed and (metric := group.metric(name))]
    return [groups[n] for _, n in sorted(known, reverse=largest)]


def _read_losses(group: RunGroup, chosen: Sequence[str], settings: str, points: int | None) -> RunTrace:
    preferred = [row for row in group.rows if row.label in chosen] or list(group.counted_rows)
    row = next((row for row in preferred if row.path), group.rows[0])
    assert row.path is not None
    return RunTrace(group, row, settings, tuple(read_steps(row.path.parent / METRICS, points)))


def _with_curves(trace: RunTrace) -> RunTrace:
    assert trace.row.path is not None
    directory = trace.row.path.parent
    memory, paths = read_memory(directory / MEMORY), (directory / PROFILE).glob(f"rank*{TRACE}")
    found = {path.name.removeprefix("rank").removesuffix(TRACE): path for path in paths}
    profiles = tuple([found[rank] for rank in sorted(filter(str.isdecimal, found), key=int)])
    curve, lanes = read_curve(directory), read_lanes(directory)
    return replace(trace, memory=memory.curves, phases=memory.phases, predicted=curve, lanes=lanes, profiles=profiles)


def read_steps(path: Path, points: int | None) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, thinned evenly to a number of points; empty without the file."""
    try:
        found = [step for step in read_entries(path) if isinstance(step.get("step"), int)]
    except OSError:
        return []
    stride = max(1, -(-len(found) // points)) if points else 1
    return [step for n, step in enumerate(found) if n % stride == 0 or n == len(found) - 1]


def read_memory(directory: Path) -> MemoryTrace:
    """Read the samples of all nodes; files that are missing or damaged are left out."""
    numbers = [path.stem.removeprefix("node") for path in directory.glob("node*.csv")]
    samples = {int(number): _read_samples(directory / f"node{number}.csv") for number in numbers if number.isdigit()}
    nodes = {node: samples[node] for node in sorted(samples) if samples[node]}
    if not nodes:
        return MemoryTrace()
    start = min(samples[0].unix_time_s for samples in nodes.values())
    phases = tuple(_phase_intervals(nodes[min(nodes)], start))
    curves = [curve for node, samples in nodes.items() for curve in _memory_curves(node, samples, start, phases)]
    return MemoryTrace(tuple(curves), phases)


def _read_samples(path: Path) -> list[MemorySample]:
    try:
        samples = read_memory_trace(path).samples
    except (OSError, ValueError):
        return []
    return [sample for sample in samples if sample.used_mib is not None]


def _memory_curves(
    node: int, samples: Sequence[MemorySample], start: float, phases: Sequence[PhaseInterval]
) -> Iterator[MemoryCurve]:
    for kind in (GPU, CPU):
        peaks: dict[float, float] = {}
        for sample in samples:
            if sample.kind == kind and sample.used_mib is not None:
                second = sample.unix_time_s - start
                peaks[second] = max(peaks.get(second, 0.0), sample.used_mib)
        if peaks:
            points = [(round(second, 2), round(mib, 1)) for second, mib in sorted(peaks.items())]
            yield MemoryCurve(node, kind, tuple(_thin(points, [phase.begin_s for phase in phases])))


def _thin(points: Points, phases: Sequence[float]) -> Points:
    """Return the peaks of MAX_POINTS intervals, at the first time of each, each peak in its own phase."""
    width = (points[-1][0] - points[0][0]) / MAX_POINTS
    if len(points) <= MAX_POINTS or not width:
        return points
    intervals: dict[tuple[int, float], tuple[float, float]] = {}
    for second, mib in points:
        key = bisect_right(phases, second), second // width
        first, peak = intervals.get(key, (second, mib))
        intervals[key] = (first, max(peak, mib))
    return list(intervals.values())


def _phase_intervals(samples: Sequence[MemorySample], start: float) -> Iterator[PhaseInterval]:
    """Yield the intervals of equal phase; each ends when the next begins."""
    changes: list[tuple[float, str]] = []
    for sample in samples:
        if sample.phase and (not changes or sample.phase != changes[-1][1]):
            changes.append((sample.unix_time_s - start, sample.phase))
    ends = [*(begin for begin, _ in changes[1:]), samples[-1].unix_time_s - start]
    for (begin, phase), end in zip(changes, ends, strict=False):
        yield PhaseInterval(phase, round(begin, 2), round(end, 2))


# Losses of runs by step, and whether runs trained the same model: their losses agree at each logged step.


NOT_THE_MODEL = frozenset(
    {"strategy", "offload", "engine", "device", "nodes", "workers"}
    | {"micro_batch_size", "gradient_accumulation_steps", "global_batch_size", "eval_batch_size"}
    | {
        "measure_after_step",
        "activation_checkpointing",
        "activation_budget",
        "parallel",
        "kernels",
        "loss_chunk_tokens",
    }
)
"""Settings, and sections of them, that should not change the losses, if the global batch is the same.

Those of ``kernel_options`` should not either, except for an own loss.
"""


DROPOUT = "With dropout or skipped paths, strategies draw other random numbers. To compare them, set {}."
BATCH_NORMS = (
    " Batch norms, if the model has any, use the samples of one worker, and the evaluation the statistics of rank 0, "
    "as with DDP. So losses depend on the micro-batch size and on the number of workers."
)
MIN_SPAN = 0.2  # of an axis, relative to the losses; a smaller one would make small differences look large
OVERLAPPING = 0.02  # distance of two curves, relative to the axis
Losses = dict[int, float]  # loss by step


def describe_same_training(overview: Overview) -> Iterator[str]:
    """Yield which runs trained the same model: at each logged step their losses agree. All steps are compared."""
    read = (_read_losses(group, (), overview.format_settings(group), None) for group in _started(overview))
    curves = [curve for curve in map(LossCurve.of, read) if curve.training]
    trainings: dict[str, list[LossCurve]] = {}
    for curve in curves:
        settings = {
            name: value for name, value in curve.trace.row.settings.items()
            if not {name, name.partition(".")[0]} & NOT_THE_MODEL and not is_strategy_option(name)
            and not is_environment_setting(name) and (name not in kernel_options() or value == "own")
        }  # fmt: skip
        trainings.setdefault(
            json.dumps([settings, global_batch(curve.trace.row.settings)], sort_keys=True, default=str), []
        ).append(curve)
    several_tasks = len({task_name(curve.trace.row.settings) for curve in curves}) > 1
    for alike in trainings.values():
        if sum(len(curve.steps) for curve in alike) > len(set().union(*(curve.steps for curve in alike))):
            yield _compare(alike, task_name(alike[0].trace.row.settings) if several_tasks else "")


def _switch_off(config: Mapping[str, Any]) -> str:
    """Return what to set for a training without dropout. A custom model may not have the key ``model.dropout``."""
    model, adapter = config.get("model") or {}, config.get("adapter") or {}
    found = ["model.dropout=0" if "dropout" in model.get("keys", ["dropout"]) else "the rates of the model to 0"]
    return " and ".join(found + ["adapter.dropout=0"] * bool(adapter.get("dropout")))


def _compare(curves: Sequence[LossCurve], task: str) -> str:
    """Describe the largest difference of any two runs at a step that both logged."""
    batch = global_batch(curves[0].trace.row.settings)
    details = ", ".join(filter(None, [task, f"global batch {batch}" if batch else ""]))
    runs = f"{len(curves)} runs" + (f" ({details})" if details else "")
    invalid, finite = (set().union(*(getattr(curve, name) for curve in curves)) for name in ("invalid", "training"))
    if steps := invalid & finite:
        names = [next(c.name for c in curves if min(steps) in getattr(c, kind)) for kind in ("invalid", "training")]
        pair = " and ".join(curve.name for curve in curves if curve.name in names)
        return f"Different losses: {runs}. At step {min(steps)} one of {pair} has no finite loss."
    built = [curve.trace.row.record.built for curve in curves]
    batch_norms = BATCH_NORMS if any(model and model.channels_last is not None for model in built) else ""
    largest, step, one, other = _widest_difference(curves, "training")
    if largest > curves[0].tolerance:
        pair = f"{one.name} and {other.name}"
        difference = f"Different losses: {runs} differ by up to {100 * largest:.2g}%, at step {step} of {pair}."
        configs = [
            curve.trace.row.record.config for curve, model in zip(curves, built, strict=True) if model and model.dropout
        ]
        return f"{difference} {DROPOUT.format(_switch_off(configs[0]))}" if configs else difference + batch_norms
    gap = f"agree within {100 * largest:.2g}%" if largest else "are equal"
    apart, step, one, other = _widest_difference(curves, "evaluation")
    firsts = [next(first for first in curves if first.steps == curve.steps) for curve in curves]
    alike = zip(firsts, curves, strict=True)
    missing = [pair for pair in alike if pair[0].evaluation.keys() ^ pair[1].evaluation.keys()]
    if missing and all(curve.trace.row.record.metrics.eval_losses for curve in curves):
        one, other = missing[0]
        return f"Different losses: {runs}. One of {one.name} and {other.name} has no finite evaluation loss."
    if apart > curves[0].tolerance:
        return (
            f"Same training losses, but other evaluation losses: {runs} {gap} in training, and differ by up to "
            f"{100 * apart:.2g}% in the evaluation at step {step} of {one.name} and {other.name}.{batch_norms}"
        )
    is_complete = all(curve.steps == curves[0].steps for curve in curves)
    compared = f"Same training: losses of {runs} {gap} at every {'logged' if is_complete else 'common logged'} step."
    return f"{compared}{_describe_proofs(curves)}"


def _widest_difference(curves: Sequence[LossCurve], kind: str) -> tuple[float, int, LossCurve, LossCurve]:
    """Return the largest relative difference of two runs, its step and the runs: the extremes of that step."""
    found = (0.0, 0, curves[0], curves[0])
    for step in sorted(set().union(*(getattr(curve, kind) for curve in curves))):
        losses = {number: curve_losses[step] for number, curve in enumerate(curves)
                  if step in (curve_losses := getattr(curve, kind))}  # fmt: skip
        one, other = sorted((min(losses, key=losses.__getitem__), max(losses, key=losses.__getitem__)))
        size = abs(relative_differences({step: losses[one]}, {step: losses[other]})[step])
        found = max(found, (size, step, curves[one], curves[other]), key=lambda difference: difference[0])
    return found


def _describe_proofs(curves: Sequence[LossCurve]) -> str:
    """Return which trainings ``distexp verify`` has compared with that of ``single``."""
    records = {curve.name: curve.trace.row.record for curve in curves}
    needed = [name for name, each in records.items() if not (each.strategy and each.strategy.one_worker)]
    proved = [name for name in needed if records[name].run.proof]
    if not proved:
        return ""
    return f" Verified by distexp verify: {'all' if proved == needed else ', '.join(proved)}."


@dataclass(frozen=True)
class LossCurve:
    """Training and evaluation losses of a run; ``invalid`` are steps whose training loss is no finite number."""

    trace: RunTrace
    training: Losses
    evaluation: Losses
    invalid: frozenset[int] = frozenset()

    @classmethod
    def of(cls, trace: RunTrace) -> LossCurve:
        """Return the losses of a trace."""
        losses = {entry["step"]: number_of(entry, "loss") for entry in trace.steps}
        training = {step: loss for step, loss in losses.items() if loss is not None and math.isfinite(loss)}
        return cls(trace, training, _evaluation_losses(trace), frozenset(losses.keys() - training.keys()))

    @property
    def steps(self) -> set[int]:
        """Return the steps that the run logged."""
        return self.training.keys() | self.invalid

    @property
    def name(self) -> str:
        """Return the label of the run."""
        return self.trace.name

    @property
    def tolerance(self) -> float:
        """Return the largest relative difference to a run of the same training."""
        return whole_training_bound(self.trace.row.settings["precision"])


def _evaluation_losses(trace: RunTrace) -> Losses:
    """Return the evaluation loss after each epoch. A training cut short evaluates at its last step."""
    record, metrics = trace.row.record, trace.row.record.metrics
    if not metrics.steps_per_epoch:
        return {}
    # A resumed training may have changed train.evaluate. Then the evaluations are those of the last epochs.
    evaluates = (record.config.get("train") or {}).get("evaluate", True)
    first = max(len(metrics.train_losses) - len(metrics.eval_losses), 0) + 1 if evaluates else 1
    steps = (epoch * metrics.steps_per_epoch for epoch in range(first, first + len(metrics.eval_losses)))
    last = metrics.total_steps
    losses = zip(steps, metrics.eval_losses, strict=True)
    return {min(step, last or step): loss for step, loss in losses if loss is not None and math.isfinite(loss)}


def relative_differences(losses: Losses, baseline: Losses) -> Losses:
    """Return the differences at the steps that both have, relative to the larger loss."""
    return {
        step: (losses[step] - baseline[step]) / max(abs(losses[step]), abs(baseline[step]), 1e-12)
        for step in sorted(losses.keys() & baseline.keys())
    }


def largest_difference(one: LossCurve, other: LossCurve, kind: str = "training") -> tuple[float, int]:
    """Return the largest relative difference of losses and its step; 0 and 0 without common steps."""
    differences = relative_differences(getattr(one, kind), getattr(other, kind))
    sizes = ((abs(difference), step) for step, difference in differences.items())
    return max(sizes, key=lambda size: size[0], default=(0.0, 0))


def all_coincide(curves: Sequence[LossCurve]) -> bool:
    """Return whether all curves have common steps, and differ by no more than their tolerance."""
    return all(
        one.training.keys() & other.training.keys()
        and largest_difference(one, other)[0] <= max(one.tolerance, other.tolerance)
        for one, other in combinations(curves, 2)
    )


def any_overlap(curves: Sequence[LossCurve]) -> bool:
    """Return whether two curves look like one, at most of their steps."""
    low, high = loss_range(curves)
    pairs = list(combinations(curves, 2))
    losses = [(one.training, other.training) for one, other in pairs]
    losses += [(one.evaluation, other.evaluation) for one, other in pairs]
    return any(_median_distance(*pair) < OVERLAPPING * (high - low) for pair in losses)


def _median_distance(one: Losses, other: Losses) -> float:
    gaps = [abs(one[step] - other[step]) for step in one.keys() & other.keys()]
    return statistics.median(gaps) if gaps else math.inf


def loss_range(curves: Sequence[LossCurve]) -> tuple[float, float]:
    """Return the range of an axis for all losses, at least MIN_SPAN of the largest wide."""
    values = [loss for curve in curves for losses in (curve.training, curve.evaluation) for loss in losses.values()]
    low, high = min(values), max(values)
    missing = MIN_SPAN * max(abs(low), abs(high)) - (high - low)
    return (low, high) if missing <= 0 else (low - missing / 2, high + missing / 2)

"""Traces of runs over time: losses, step times and memory, thinned for charts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distexp.report.data.metrics import MEMORIES, SPEED
from distexp.report.data.overview import Overview
from distexp.report.data.repeats import RunGroup
from distexp.report.data.rows import Row, run_label
from distexp.report.data.step_parts import RankLanes, read_lanes
from distexp.runs.memory_trace import CPU, GPU, MemorySample, read_memory_trace
from distexp.runs.predictions import Curve, read_curve
from distexp.runs.run_dir import MEMORY, METRICS, PROFILE
from distexp.system.files import read_entries

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
    groups = started_groups(overview)
    named = [group for group in groups if any(row.label in chosen for row in group.rows)]
    drawn = named if chosen else most_informative(groups)
    return [_with_curves(read_losses(overview, group, _drawn_row(group, chosen), MAX_POINTS)) for group in drawn]


def started_groups(overview: Overview) -> list[RunGroup]:
    """Return the groups whose records were read from disk, and that were not invalid."""
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


def _drawn_row(group: RunGroup, chosen: Sequence[str]) -> Row:
    preferred = [row for row in group.rows if row.label in chosen] or list(group.counted_rows)
    return next((row for row in preferred if row.path), group.rows[0])


def read_losses(overview: Overview, group: RunGroup, row: Row, points: int | None = None) -> RunTrace:
    """Read the steps of a run, thinned to a number of points, or all."""
    assert row.path is not None
    steps = tuple(read_steps(row.path.parent / METRICS, points))
    return RunTrace(group, row, overview.format_settings(group), steps)


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

"""Peak, average and mode of memory over time, utilisation and energy: what the record holds of a trace."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from distexp.runs.memory_trace import CPU, GPU, MemorySample, read_memory_trace
from distexp.runs.phases import PhaseEvent, phase_at, phase_intervals, read_phase_events

Entry = dict[str, Any]
DISTURBED = "profile"
"""The phase whose memory and utilisation are a profiler's too: they are told apart, and in no total."""


@dataclass(frozen=True)
class Statistics:
    """A memory series in MiB, as the workshops' analyze_memory defines it: over samples, each counting once."""

    peak: float
    average: float
    modes: tuple[int, ...]  # the most frequent values, rounded to a MiB, in order; several where tied

    @classmethod
    def of(cls, values: Iterable[float]) -> Statistics | None:
        """The statistics of some values; None of none."""
        known = list(values)
        if not known:
            return None
        # Fractions of a MiB, as of PSS and psrecord, hardly repeat: unrounded, each would be a mode.
        counts = Counter(math.floor(value + 0.5) for value in known)
        most = max(counts.values())
        modes = tuple(sorted(value for value, count in counts.items() if count == most))
        return cls(max(known), sum(known) / len(known), modes)


@dataclass
class Summary:
    """The parts of a record that come from traces, and a sentence for what could not be read."""

    memory: dict[str, list[Entry]]  # gpu, cpu
    utilization: dict[str, list[Entry]]
    notes: list[str]


def summarize(traces: Sequence[Path], events: Path | None = None) -> Summary:
    """Sums traces up, in the form of ``record.json``; a trace that cannot be read is a note, and null.

    ``mode_mib`` is the smallest of tied modes. Each entry has ``phases`` beside the contract's keys: the
    peak (of utilisation: the average) in each phase. A GPU's ``job_peak_mib`` is that of this job's
    processes alone, null where NVML does not tell; ``source`` says how memory was read.
    """
    summary = Summary({GPU: [], CPU: []}, {GPU: [], CPU: []}, [])
    for position, path in enumerate(traces):
        node = node_of(path, position)
        by_device = _devices(_samples(path, events, summary.notes))
        by_device.setdefault((CPU, 0), [])
        for (kind, index), samples in sorted(by_device.items()):
            place: Entry = {"node": node} if kind == CPU else {"node": node, "index": index}
            summary.memory[kind].append(place | _memory(kind, samples))
            summary.utilization[kind].append(place | _utilization(samples))
    return summary


def summarize_run(run_dir: Path, nodes: int) -> Summary:
    """The summary of a run directory, whose traces are one a node."""
    return summarize(run_traces(run_dir, nodes), run_dir / "events.jsonl")


def run_traces(run_dir: Path, nodes: int) -> list[Path]:
    """Where a run's traces are, or should be."""
    return [run_dir / "memory" / f"node{node}.csv" for node in range(nodes)]


def node_of(path: Path, position: int) -> int:
    """The node that a trace is of, by its name; any other file counts by its position."""
    named = re.fullmatch(r"node(\d+)", path.stem)
    return int(named[1]) if named else position


def _samples(path: Path, events: Path | None, notes: list[str]) -> list[MemorySample]:
    """A trace's samples with their phases; none, and a note, where it cannot be read."""
    try:
        trace = read_memory_trace(path)
        marks = read_phase_events(events) if events is not None else []
    except (OSError, ValueError) as error:
        notes.append(f"no memory trace: {error}")
        return []
    notes += trace.notes
    return join_phases(trace.samples, marks)


def join_phases(samples: Iterable[MemorySample], events: Sequence[PhaseEvent]) -> list[MemorySample]:
    """Return the samples with their phases by time.

    An event may reach the disk after the sample that it covers. A sample before the first event keeps its phase.
    """
    return [replace(sample, phase=phase_at(events, sample.unix_time_s) or sample.phase) for sample in samples]


def _devices(samples: Iterable[MemorySample]) -> dict[tuple[str, int], list[MemorySample]]:
    found: dict[tuple[str, int], list[MemorySample]] = {}
    for sample in samples:
        found.setdefault((sample.kind, sample.index), []).append(sample)
    return found


def _memory(kind: str, samples: Sequence[MemorySample]) -> Entry:
    # What the profiler takes on a GPU it keeps, in what follows too.
    counted = list(takewhile(_undisturbed, samples)) if kind == GPU else list(filter(_undisturbed, samples))
    statistics = Statistics.of(_known(counted, lambda sample: sample.used_mib))
    entry: Entry = {
        "peak_mib": statistics.peak if statistics else None,
        "average_mib": statistics.average if statistics else None,
        "mode_mib": statistics.modes[0] if statistics else None,
    }
    if kind == GPU:
        entry["job_peak_mib"] = max(_known(counted, lambda sample: sample.job_mib), default=None)
    entry["phases"] = _by_phase(samples, lambda sample: sample.used_mib, max)
    sources = {source: None for sample in samples for source in sample.source.split("+") if source}
    entry["source"] = "+".join(sources) or None
    return entry


def _utilization(samples: Sequence[MemorySample]) -> Entry:
    values = _known(filter(_undisturbed, samples), lambda sample: sample.utilization_pct)
    return {
        "average_pct": _mean(values) if values else None,
        "phases": _by_phase(samples, lambda sample: sample.utilization_pct, _mean),
    }


def _undisturbed(sample: MemorySample) -> bool:
    return sample.phase != DISTURBED


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _known(samples: Iterable[MemorySample], value: Callable[[MemorySample], float | None]) -> list[float]:
    return [known for known in map(value, samples) if known is not None]


def _by_phase(
    samples: Sequence[MemorySample],
    value: Callable[[MemorySample], float | None],
    combine: Callable[[Sequence[float]], float],
) -> dict[str, float]:
    """One figure for each phase that is known, in the order in which they come."""
    phases: dict[str, list[float]] = {}
    for sample in samples:
        known = value(sample)
        if known is not None and sample.phase:
            phases.setdefault(sample.phase, []).append(known)
    return {phase: combine(values) for phase, values in phases.items()}


def energy_j(traces: Sequence[Path], events: Path, phases: Collection[str] = frozenset({"train"})) -> float | None:
    """Joules that all GPUs of all traces drew in some phases, by default in training after the warm-up.

    By the GPUs' own energy counters, or where one has none by the trapezoid over its power; between two
    samples the energy is taken as linear. None where a trace or a figure is missing, or ends too early.
    """
    total = 0.0
    spans = phase_intervals(read_phase_events(events), phases)
    for path in traces:
        try:
            devices = _devices(read_memory_trace(path).samples)
        except (OSError, ValueError):
            return None
        curves = [_energy_curve(samples) for (kind, _), samples in devices.items() if kind == GPU]
        drawn = [_drawn(curve, span) for curve in curves for span in spans]
        known = [energy for energy in drawn if energy is not None]
        if not drawn or len(known) < len(drawn):
            return None
        total += sum(known)
    return total if traces else None


def _energy_curve(samples: Sequence[MemorySample]) -> list[tuple[float, float]]:
    """Energy (J, from an arbitrary start) over time (unix s); empty where the GPU tells neither."""
    counter = [(s.unix_time_s, s.energy_j) for s in samples if s.energy_j is not None]
    if len(counter) == len(samples) and all(a[1] <= b[1] for a, b in pairwise(counter)):
        return counter
    power = [(s.unix_time_s, s.power_w) for s in samples if s.power_w is not None]
    curve = [(power[0][0], 0.0)] if power else []
    for (begin, one), (end, other) in pairwise(power):
        curve.append((end, curve[-1][1] + (end - begin) * (one + other) / 2))
    return curve


def _drawn(curve: Sequence[tuple[float, float]], span: tuple[float, float]) -> float | None:
    """Joules in a stretch of time; None where the samples end more than two spacings inside it."""
    if len(curve) < 2:
        return None
    begin, end = span[0], min(span[1], curve[-1][0]) if math.isinf(span[1]) else span[1]
    spacing = (curve[-1][0] - curve[0][0]) / (len(curve) - 1)
    if curve[0][0] - begin > 2 * spacing or end - curve[-1][0] > 2 * spacing:
        return None
    return _at(curve, end) - _at(curve, begin)


def _at(curve: Sequence[tuple[float, float]], time_s: float) -> float:
    """The curve at a time, by linear interpolation; outside it as its first or last stretch goes on."""
    position = min(max(bisect_right(curve, (time_s, math.inf)), 1), len(curve) - 1)
    before, after = curve[position - 1], curve[position]
    slope = (after[1] - before[1]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
    return before[1] + slope * (time_s - before[0])

"""Memory and utilization of a run, computed from its memory traces for the record."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

from distexp.runs.device_entries import UNCOUNTED_CPU_PHASES
from distexp.runs.memory_trace import CPU, GPU, MemorySample, group_by_device, read_memory_trace
from distexp.runs.phases import PhaseEvent, phase_at, read_phase_events
from distexp.runs.run_dir import EVENTS, memory_trace_path

Entry = dict[str, Any]
PROFILING_PHASE = "profile"
"""Phase that is excluded from the totals, because the profiler uses memory and time itself."""


SEARCH_PHASE = "search"
"""Phase of the search for a micro-batch size. It is excluded too, because it tries sizes that are not chosen."""

TRAINING_PHASES = frozenset({"warmup", "train"})
"""Phases of the training steps. Before them a run may be small for most of its time."""


@dataclass(frozen=True)
class Statistics:
    """Statistics of memory samples in MiB, as the workshop's analyze_memory defines them."""

    peak: float
    average: float
    modes: tuple[int, ...]  # the most frequent values, rounded to MiB, sorted; several if tied

    @classmethod
    def of(cls, values: Iterable[float]) -> Statistics | None:
        """Return the statistics of some values, or None if there are none."""
        known = list(values)
        if not known:
            return None
        # PSS and psrecord report fractions of a MiB, which hardly repeat. Without rounding, each would be a mode.
        counts = Counter(math.floor(value + 0.5) for value in known)
        most = max(counts.values())
        modes = tuple(sorted(value for value, count in counts.items() if count == most))
        return cls(max(known), sum(known) / len(known), modes)


@dataclass
class Summary:
    """Parts of a record that come from memory traces, with notes on traces that cannot be read."""

    memory: dict[str, list[Entry]]  # gpu, cpu
    utilization: dict[str, list[Entry]]
    notes: list[str]


def summarize(traces: Sequence[Path], events: Path | None = None) -> Summary:
    """Summarize memory traces in the format of ``record.json``.

    ``training_average_mib`` and ``training_mode_mib`` cover the training steps only, the others the whole run. Each
    entry has ``phases``: the peak memory, or the average utilization, of each phase. ``mode_mib`` is the smallest
    of tied modes. ``job_peak_mib`` of a GPU covers the processes of this job only, and is None if NVML does not report
    them. ``compiler_peak_mib`` is the peak of compilers, which no other value contains. ``source`` is how memory was
    read. A trace that cannot be read adds a note, and its values are None.
    """
    summary = Summary({GPU: [], CPU: []}, {GPU: [], CPU: []}, [])
    for position, path in enumerate(traces):
        node = node_of(path, position)
        by_device = group_by_device(_samples(path, events, summary.notes))
        by_device.setdefault((CPU, 0), [])
        for (kind, index), samples in sorted(by_device.items()):
            device: Entry = {"node": node} if kind == CPU else {"node": node, "index": index}
            summary.memory[kind].append(device | _memory(kind, samples))
            summary.utilization[kind].append(device | _utilization(samples))
    return summary


def summarize_run(run_dir: Path, nodes: int) -> Summary:
    """Summarize the traces of a run directory, which contains one per node."""
    return summarize(run_traces(run_dir, nodes), run_dir / EVENTS)


def run_traces(run_dir: Path, nodes: int) -> list[Path]:
    """Return the paths of a run's memory traces, whether they exist or not."""
    return [memory_trace_path(run_dir, node) for node in range(nodes)]


def node_of(path: Path, position: int) -> int:
    """Return the node of a trace from its file name, or its position for any other name."""
    named = re.fullmatch(r"node(\d+)", path.stem)
    return int(named[1]) if named else position


def _samples(path: Path, events: Path | None, notes: list[str]) -> list[MemorySample]:
    """Return the samples of a trace with their phases; if it cannot be read, add a note."""
    try:
        trace = read_memory_trace(path)
        phase_events = read_phase_events(events) if events is not None else []
    except (OSError, ValueError) as error:
        notes.append(f"no memory trace: {error}")
        return []
    notes += trace.notes
    return join_phases(trace.samples, phase_events)


def join_phases(samples: Iterable[MemorySample], events: Sequence[PhaseEvent]) -> list[MemorySample]:
    """Return the samples with their phases by time.

    An event may reach the disk after the sample that it covers. A sample before the first event keeps its phase.
    """
    return [replace(sample, phase=phase_at(events, sample.unix_time_s) or sample.phase) for sample in samples]


def _memory(kind: str, samples: Sequence[MemorySample]) -> Entry:
    if kind == GPU:  # The profiler keeps its GPU memory until the process ends, so all later samples are excluded too.
        counted = list(takewhile(_is_not_profiling, filter(_is_not_searching, samples)))
    else:
        counted = _counted_on_cpu(samples)
    statistics = Statistics.of(_known(counted, lambda sample: sample.used_mib))
    steps = [sample for sample in counted if sample.phase in TRAINING_PHASES]
    training = Statistics.of(_known(steps, lambda sample: sample.used_mib))
    entry: Entry = {
        "peak_mib": statistics.peak if statistics else None,
        "average_mib": statistics.average if statistics else None,
        "mode_mib": statistics.modes[0] if statistics else None,
        "training_average_mib": training.average if training else None,
        "training_mode_mib": training.modes[0] if training else None,
    }
    if kind == GPU:
        entry["job_peak_mib"] = max(_known(counted, lambda sample: sample.job_mib), default=None)
    else:
        entry["compiler_peak_mib"] = max(_known(counted, lambda sample: sample.compiler_mib), default=None)
    entry["phases"] = _by_phase(samples, lambda sample: sample.used_mib, max)
    sources = {source: None for sample in samples for source in sample.source.split("+") if source}
    entry["source"] = "+".join(sources) or None
    return entry


def _counted_on_cpu(samples: Sequence[MemorySample]) -> list[MemorySample]:
    """Return the samples of the phases that count.

    A sample before the first phase counts only if no phase has memory: while processes start, memory that they share
    may count several times. A phase may have samples without memory, of processes that have ended.
    """
    counted = [sample for sample in samples if sample.phase not in UNCOUNTED_CPU_PHASES]
    in_phases = [sample for sample in counted if sample.phase]
    return in_phases if any(sample.used_mib is not None for sample in in_phases) else counted


def _utilization(samples: Sequence[MemorySample]) -> Entry:
    counted = filter(_is_not_profiling, filter(_is_not_searching, samples))
    values = _known(counted, lambda sample: sample.utilization_pct)
    return {
        "average_pct": fmean(values) if values else None,
        "phases": _by_phase(samples, lambda sample: sample.utilization_pct, fmean),
    }


def _is_not_searching(sample: MemorySample) -> bool:
    return sample.phase != SEARCH_PHASE


def _is_not_profiling(sample: MemorySample) -> bool:
    return sample.phase != PROFILING_PHASE


def _known(samples: Iterable[MemorySample], value: Callable[[MemorySample], float | None]) -> list[float]:
    return [known for known in map(value, samples) if known is not None]


def _by_phase(
    samples: Sequence[MemorySample],
    value: Callable[[MemorySample], float | None],
    combine: Callable[[Sequence[float]], float],
) -> dict[str, float]:
    """Return one value per phase, in the order of the phases."""
    phases: dict[str, list[float]] = {}
    for sample in samples:
        known = value(sample)
        if known is not None and sample.phase:
            phases.setdefault(sample.phase, []).append(known)
    return {phase: combine(values) for phase, values in phases.items()}

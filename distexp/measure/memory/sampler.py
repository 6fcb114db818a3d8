"""Sampling of a node's memory from outside its workers, in a thread of the agent, and the summary for the record."""

from __future__ import annotations

import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from statistics import fmean, multimode
from typing import Any

from distexp.exceptions import name_limit
from distexp.measure.memory import gpu_reader, process_tree
from distexp.measure.run_energy import CpuEnergyReader
from distexp.runs.events import PhaseEvent, PhaseTail, phase_at, read_phase_events
from distexp.runs.memory_trace import CPU, GPU, MemorySample, MemoryTraceWriter, group_by_device, read_memory_trace
from distexp.runs.run_dir import EVENTS, memory_trace_path
from distexp.system import cgroups, typed_values, units

SAMPLING_SHARE = 0.1  # share of one core's time that sampling may cost
COST_WINDOW = 3  # samples whose minimum is the cost of a sample, because a slow one is noise
STOP_TIMEOUT_S = 5.0  # how long the end of a run waits for the last sample


class Sampler:
    """Writes a memory trace while its ``with`` block runs. An interval that is not positive raises ValueError.

    It takes a sample at the start, one at each multiple of the interval, and one at the end. A sample is skipped if
    sampling would cost more than ``SAMPLING_SHARE`` of a core. On the CPU, the memory is that of all descendants of
    ``root_pid``, without that process itself, which is the agent, and without compilers. By default this is the current
    process, ``events`` is the file of the run directory, and ``cores`` are those that this process may use.

    An error never stops the run: it is printed once to stderr, and the trace lacks the values.
    """

    def __init__(
        self,
        *,
        path: Path,
        root_pid: int | None = None,
        gpu_indices: Sequence[int] = (),
        interval_s: float = 0.5,
        events: Path | None = None,
        cores: int | None = None,
    ) -> None:
        if interval_s <= 0:
            raise ValueError(f"interval_s={interval_s} must be greater than 0: set the seconds between two samples")
        self.path, self.interval_s = path, interval_s
        self.root_pid = os.getpid() if root_pid is None else root_pid
        self.cores = cores or cgroups.cpu_count()
        self._gpu_indices = tuple(gpu_indices)
        self._tail = PhaseTail(events or path.parent.parent / EVENTS)
        self._tree = process_tree.ProcessTree(self.root_pid)
        self.include = self._tree.include
        self._gpus: gpu_reader.GpuReader | None = None
        self._cpu_energy = CpuEnergyReader()
        self._total_mib: float | None = None
        self._read_at: float | None = None
        self._limit = process_tree.CostLimit(SAMPLING_SHARE, COST_WINDOW)
        self._warned: set[str] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)

    def __enter__(self) -> Sampler:
        try:
            self._thread.start()
        except RuntimeError as error:  # The limit of processes is reached.
            self._warn("start", f"{name_limit(str(error))}. This run has no memory trace")
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            self._warn("stop", f"the last sample takes more than {STOP_TIMEOUT_S:.0f} s and is skipped")

    def _run(self) -> None:
        try:
            file = MemoryTraceWriter(self.path)
        except OSError as error:
            self._warn("file", f"{self.path} cannot be written ({error}): this run has no memory trace")
            return
        try:
            self._open_sources()
            self._sample_until_stopped(file)
        except Exception as error:
            self._warn("run", f"stopped by {type(error).__name__}: {error}; {self.path} is incomplete")
        finally:
            if self._gpus is not None:
                self._gpus.close()
            file.close()

    def _open_sources(self) -> None:
        try:
            self._total_mib = cgroups.usable_memory(self.root_pid) / units.MIB
        except (OSError, ValueError, IndexError) as error:
            self._warn("limit", f"the memory of the machine is unknown ({error}); total_mib is left empty")
        if not self._gpu_indices:
            return
        try:
            self._gpus = gpu_reader.GpuReader(self._gpu_indices, lambda text: self._warn(text, text))
        except Exception as error:  # any: a broken driver must not stop the run
            self._warn("nvml", f"NVML is not available ({error}); the values of the GPUs are left empty")

    def _sample_until_stopped(self, file: MemoryTraceWriter) -> None:
        started, tick = time.monotonic(), 0
        while not self._stopped.wait(started + tick * self.interval_s - time.monotonic()):
            if self._limit.allows():
                self._sample(file)
            else:
                cost = f"a sample costs {self._limit.cost_s * 1000:.0f} ms of CPU time, more than {SAMPLING_SHARE:.0%}"
                self._warn("cost", f"{cost} of {self.interval_s:g} s: some samples are skipped")
            tick = max(tick, math.floor((time.monotonic() - started) / self.interval_s)) + 1
        self._sample(file)

    def _sample(self, file: MemoryTraceWriter) -> None:
        with self._limit.measure():
            try:
                file.append(self._read())
            except Exception as error:  # any: the next sample may succeed, for example after a disk was full
                self._warn("sample", f"a sample is lost ({type(error).__name__}: {error}); {self.path} has a gap")

    def _read(self) -> Iterator[MemorySample]:
        now, clock = time.time(), time.monotonic()
        phase = self._phase(now)
        tree = self._tree.read()
        elapsed = None if self._read_at is None else clock - self._read_at
        self._read_at = clock
        sample = MemorySample(
            *(now, phase, CPU, 0),
            used_mib=None,
            total_mib=self._total_mib,
            utilization_pct=100 * tree.cpu_s / elapsed / self.cores if elapsed else None,
            energy_j=self._cpu_energy.read(tree.cpu_s),
        )
        if (memory := tree.memory) is None:
            yield sample
        else:
            if "rss" in memory.source:
                how = "RSS is used instead and counts shared pages several times (column source)"
                self._warn("rss", f"PSS is not readable for every process; {how}")
            yield replace(sample, used_mib=memory.mib, source=memory.source, compiler_mib=memory.compiler_mib)
        for index in self._gpu_indices:
            empty = MemorySample(now, phase, GPU, index, used_mib=None)
            yield empty if self._gpus is None else self._gpus.read(empty, tree.pids)

    def _phase(self, now: float) -> str:
        try:
            return self._tail.at(now)
        except OSError as error:
            self._warn("phase", f"{self._tail.path} cannot be read ({error}): samples have no phase")
            return ""

    def _warn(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            print(f"memory sampler: {text}", file=sys.stderr, flush=True)


Entry = dict[str, Any]
# Phases that the totals exclude: the profiler uses memory itself, and trials are no part of the training.
PROFILING_PHASE, TRIAL_PHASES = "profile", typed_values.TRIAL_PHASES
TRAINING_PHASES = frozenset({"warmup", "train"})  # Before them a run may be small for most of its time.


def round_half_up(mib: float) -> int:
    """Round a memory. ``round`` would round a half to the even number, so that a peak may be below a mode."""
    return math.floor(mib + 0.5)


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
        # PSS and psrecord report fractions of a MiB, which hardly repeat. Without rounding, each would be a mode.
        modes = tuple(sorted(multimode(map(round_half_up, known))))
        return cls(max(known), sum(known) / len(known), modes) if known else None


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
        named = re.fullmatch(r"node(\d+)", path.stem)
        node = int(named[1]) if named else position
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
    """Return the samples with their phases by time: an event may reach the disk after the sample that it covers."""
    return [replace(sample, phase=phase_at(events, sample.unix_time_s) or sample.phase) for sample in samples]


def _memory(kind: str, samples: Sequence[MemorySample]) -> Entry:
    if kind == GPU:  # The profiler keeps its GPU memory until the process ends, so all later samples are excluded too.
        not_searching = (sample for sample in samples if sample.phase not in TRIAL_PHASES)
        counted = list(takewhile(lambda sample: sample.phase != PROFILING_PHASE, not_searching))
    else:
        counted = _counted_on_cpu(samples)
    steps = [sample for sample in counted if sample.phase in TRAINING_PHASES]
    statistics, training = (Statistics.of(known_values(of, lambda s: s.used_mib)) for of in (counted, steps))
    entry: Entry = {
        "peak_mib": statistics.peak if statistics else None,
        "average_mib": statistics.average if statistics else None,
        "mode_mib": statistics.modes[0] if statistics else None,
        "training_average_mib": training.average if training else None,
        "training_mode_mib": training.modes[0] if training else None,
    }
    if kind == GPU:
        entry["job_peak_mib"] = max(known_values(counted, lambda sample: sample.job_mib), default=None)
    else:
        entry["compiler_peak_mib"] = max(known_values(counted, lambda sample: sample.compiler_mib), default=None)
    entry["phases"] = _by_phase(samples, lambda sample: sample.used_mib, max)
    sources = {source: None for sample in samples for source in sample.source.split("+") if source}
    entry["source"] = "+".join(sources) or None
    return entry


def _counted_on_cpu(samples: Sequence[MemorySample]) -> list[MemorySample]:
    """Return the samples of the phases that count.

    A sample before the first phase counts only if no phase has memory: while processes start, memory that they share
    may count several times. A phase may have samples without memory, of processes that have ended.
    """
    counted = [sample for sample in samples if sample.phase not in typed_values.UNCOUNTED_CPU_PHASES]
    in_phases = [sample for sample in counted if sample.phase]
    return in_phases if any(sample.used_mib is not None for sample in in_phases) else counted


def _utilization(samples: Sequence[MemorySample]) -> Entry:
    counted = [sample for sample in samples if sample.phase not in (*TRIAL_PHASES, PROFILING_PHASE)]
    values = known_values(counted, lambda sample: sample.utilization_pct)
    return {
        "average_pct": fmean(values) if values else None,
        "phases": _by_phase(samples, lambda sample: sample.utilization_pct, fmean),
    }


def known_values(samples: Iterable[MemorySample], value: Callable[[MemorySample], float | None]) -> list[float]:
    """Return a value of the samples that have it."""
    return [known for known in map(value, samples) if known is not None]


def _by_phase(
    samples: Sequence[MemorySample],
    value: Callable[[MemorySample], float | None],
    combine: Callable[[Sequence[float]], float],
) -> dict[str, float]:
    """Return one value per phase, in the order of the phases."""
    phases = dict.fromkeys(sample.phase for sample in samples if sample.phase)
    values = {phase: known_values((s for s in samples if s.phase == phase), value) for phase in phases}
    return {phase: combine(known) for phase, known in values.items() if known}

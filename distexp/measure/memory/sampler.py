"""Sampling of a node's memory from outside its workers, in a thread of the agent."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from distexp.measure.energy.cpu_reader import CpuEnergyReader
from distexp.measure.memory.cost_limit import CostLimit
from distexp.measure.memory.gpu_reader import GpuReader
from distexp.measure.memory.process_tree import ProcessTree
from distexp.runs.memory_trace import CPU, GPU, MemorySample, MemoryTraceWriter
from distexp.runs.phases import PhaseTail
from distexp.runs.run_dir import EVENTS
from distexp.system.cgroups import usable_memory
from distexp.system.hardware import cpu_count
from distexp.system.units import MIB

SAMPLING_SHARE = 0.1
"""Share of one core's time that sampling may cost."""

COST_WINDOW = 3
"""Samples whose minimum is the cost of a sample."""

STOP_TIMEOUT_S = 5.0
"""How long the end of a run waits for the last sample."""


class Sampler:
    """Writes a memory trace while its ``with`` block runs.

    It takes a sample at the start, one at each multiple of the interval, and one at the end. A sample is skipped if
    sampling would cost more than ``SAMPLING_SHARE`` of a core. On the CPU, the memory is that of all descendants of
    ``root_pid``, without that process itself, which is the agent, and without compilers.

    An error never stops the run: it is printed once to stderr, and the trace lacks the values.

    Args:
        path: The trace to write.
        root_pid: Root of the process tree, by default this process.
        gpu_indices: Indices of the GPUs in NVML.
        interval_s: Seconds between two samples.
        events: File with the phases, by default ``events.jsonl`` in the run directory.
        cores: Cores that the node may use, by default those of this process.

    Raises:
        ValueError: The interval is not positive.
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
        self.path = path
        self.interval_s = interval_s
        self.root_pid = os.getpid() if root_pid is None else root_pid
        self.cores = cores or cpu_count()
        self._gpu_indices = tuple(gpu_indices)
        self._tail = PhaseTail(events or path.parent.parent / EVENTS)
        self._tree = ProcessTree(self.root_pid)
        self._gpus: GpuReader | None = None
        self._cpu_energy = CpuEnergyReader()
        self._total_mib: float | None = None
        self._read_at: float | None = None
        self._limit = CostLimit(SAMPLING_SHARE, COST_WINDOW)
        self._warned: set[str] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            self._warn("stop", f"the last sample takes more than {STOP_TIMEOUT_S:.0f} s and is skipped")

    def include(self, member: int, forked_from: int, others: Sequence[int] = ()) -> None:
        """Add a process that is no descendant of the root; see ``ProcessTree.include``."""
        self._tree.include(member, forked_from, others)

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
            self._total_mib = usable_memory(self.root_pid) / MIB
        except (OSError, ValueError, IndexError) as error:
            self._warn("limit", f"the memory of the machine is unknown ({error}); total_mib is left empty")
        if not self._gpu_indices:
            return
        try:
            self._gpus = GpuReader(self._gpu_indices, lambda text: self._warn(text, text))
        except Exception as error:  # any: a broken driver must not stop the run
            self._warn("nvml", f"NVML is not available ({error}); the values of the GPUs are left empty")

    def _sample_until_stopped(self, file: MemoryTraceWriter) -> None:
        started = time.monotonic()
        tick = 0
        while not self._stopped.wait(started + tick * self.interval_s - time.monotonic()):
            if self._limit.allows():
                self._sample(file)
            else:
                self._warn_of_cost()
            missed = math.floor((time.monotonic() - started) / self.interval_s) + 1
            tick = max(tick + 1, missed)
        self._sample(file)

    def _sample(self, file: MemoryTraceWriter) -> None:
        with self._limit.measure():
            try:
                file.append(self._read())
            except Exception as error:  # any: the next sample may succeed, for example after a disk was full
                self._warn("sample", f"a sample is lost ({type(error).__name__}: {error}); {self.path} has a gap")

    def _warn_of_cost(self) -> None:
        self._warn(
            "cost",
            f"a sample costs {self._limit.cost_s * 1000:.0f} ms of CPU time, more than {SAMPLING_SHARE:.0%} of "
            f"{self.interval_s:g} s: some samples are skipped",
        )

    def _read(self) -> Iterator[MemorySample]:
        now, clock = time.time(), time.monotonic()
        phase = self._phase(now)
        tree = self._tree.read()
        elapsed = None if self._read_at is None else clock - self._read_at
        self._read_at = clock
        cpu_j = self._cpu_energy.read(tree.cpu_s)
        if tree.memory is not None and "rss" in tree.memory.source:
            self._warn(
                "rss",
                "PSS is not readable for every process; RSS is used instead and counts shared pages several times "
                "(column source)",
            )
        yield MemorySample(
            unix_time_s=now,
            phase=phase,
            kind=CPU,
            index=0,
            used_mib=tree.memory.mib if tree.memory else None,
            total_mib=self._total_mib,
            utilization_pct=100 * tree.cpu_s / elapsed / self.cores if elapsed else None,
            energy_j=cpu_j,
            source=tree.memory.source if tree.memory else "",
            compiler_mib=tree.memory.compiler_mib if tree.memory else None,
        )
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

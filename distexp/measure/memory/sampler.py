"""Samples a node's memory from outside its workers, in a thread of the agent."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from distexp.measure.memory.nvml import GpuReader, GpuReading
from distexp.measure.memory.proctree import ProcessTree
from distexp.runs.events import FILE as EVENTS
from distexp.runs.memory_trace import CPU, GPU, MemorySample, MemoryTraceWriter
from distexp.runs.phases import PhaseTail
from distexp.system.cgroups import usable_memory
from distexp.system.hardware import cpu_count
from distexp.system.units import MIB

LARGEST_SHARE = 0.1  # of the time, that sampling may cost in CPU time
COSTS = 3  # how many samples are judged together
STOP_S = 5.0  # how long the end of a run waits for the last sample


class Sampler:
    """Writes ``path`` while its ``with`` block runs: a sample at once, one each interval, one at the end.

    CPU: all processes below ``root_pid`` but not that one itself, which is the agent and no part of the
    training. GPUs: those of ``gpu_indices``, which are NVML's. The phases come from the run directory's
    ``events.jsonl``. Samples are due at whole multiples of ``interval_s`` after the first; where one costs
    more than a tenth of that in CPU time, some are left out, and it is said.

    Nothing that goes wrong here ends a run or raises: it is said once on stderr, and the trace lacks it.
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
        """``cores``: those that the node may use, by default this process'; ValueError on a bad interval."""
        if interval_s <= 0:
            raise ValueError(f"interval_s={interval_s} is not above 0: set the seconds between two samples")
        self.path = path
        self.interval_s = interval_s
        self.root_pid = os.getpid() if root_pid is None else root_pid
        self.cores = cores or cpu_count()
        self._gpu_indices = tuple(gpu_indices)
        self._tail = PhaseTail(events or path.parent.parent / EVENTS)
        self._tree = ProcessTree(self.root_pid)
        self._gpus: GpuReader | None = None
        self._total_mib: float | None = None
        self._read_at: float | None = None
        self._costs: deque[float] = deque(maxlen=COSTS)  # CPU seconds of the last samples
        self._longest_stride = 1
        self._said: set[str] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            self._warn("stop", f"the last sample takes more than {STOP_S:.0f} s and is given up")

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
            self._warn("run", f"stopped by {type(error).__name__}: {error}; {self.path} ends here")
        finally:
            if self._gpus is not None:
                self._gpus.close()
            file.close()

    def _open_sources(self) -> None:
        try:
            self._total_mib = usable_memory(self.root_pid) / MIB
        except (OSError, ValueError, IndexError) as error:
            self._warn("limit", f"the machine's memory cannot be told ({error}); total_mib is left empty")
        if not self._gpu_indices:
            return
        try:
            self._gpus = GpuReader(self._gpu_indices, lambda text: self._warn(text, text))
        except Exception as error:  # pynvml's errors are known only once it is there
            self._warn("nvml", f"NVML is not available ({error}); the GPUs' figures are left empty")

    def _sample_until_stopped(self, file: MemoryTraceWriter) -> None:
        begun = time.monotonic()
        tick = 0
        while not self._stopped.wait(begun + tick * self.interval_s - time.monotonic()):
            self._sample(file)
            missed = math.floor((time.monotonic() - begun) / self.interval_s) + 1
            tick = max(tick + self._stride(), missed)
        self._sample(file)

    def _sample(self, file: MemoryTraceWriter) -> None:
        started = time.thread_time()
        try:
            file.append(self._read())
        except Exception as error:  # the next one may go well again: a full disk is emptied, say
            self._warn("sample", f"a sample is lost ({type(error).__name__}: {error}); {self.path} has a gap")
        self._costs.append(time.thread_time() - started)

    def _stride(self) -> int:
        """How many intervals to the next sample; a single dear sample may be chance."""
        if len(self._costs) < COSTS:
            return 1
        cost = min(self._costs)
        stride = max(1, math.ceil(cost / LARGEST_SHARE / self.interval_s))
        if stride > self._longest_stride:
            self._longest_stride = stride
            self._warn(
                f"stride {stride}",
                f"a sample costs {cost * 1000:.0f} ms of CPU time, more than {LARGEST_SHARE:.0%} of "
                f"{self.interval_s} s: sampling every {stride * self.interval_s:g} s instead",
            )
        return stride

    def _read(self) -> Iterator[MemorySample]:
        now, clock = time.time(), time.monotonic()
        phase = self._phase(now)
        tree = self._tree.read()
        since = None if self._read_at is None else clock - self._read_at
        self._read_at = clock
        if tree.memory is not None and "rss" in tree.memory.source:
            self._warn(
                "rss",
                "PSS is not readable for every process, RSS is taken instead: shared pages count more than "
                "once (column source)",
            )
        yield MemorySample(
            unix_time_s=now,
            phase=phase,
            kind=CPU,
            index=0,
            used_mib=tree.memory.mib if tree.memory else None,
            total_mib=self._total_mib,
            utilization_pct=100 * tree.cpu_s / since / self.cores if since else None,
            source=tree.memory.source if tree.memory else "",
        )
        for gpu in self._read_gpus(tree.pids):
            yield MemorySample(unix_time_s=now, phase=phase, kind=GPU, **vars(gpu))

    def _phase(self, now: float) -> str:
        try:
            return self._tail.at(now)
        except OSError as error:
            self._warn("phase", f"{self._tail.path} cannot be read ({error}): samples have no phase")
            return ""

    def _read_gpus(self, pids: frozenset[int]) -> list[GpuReading]:
        if self._gpus is None:
            return [GpuReading(index) for index in self._gpu_indices]
        return self._gpus.read(pids)

    def _warn(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            print(f"memory sampler: {text}", file=sys.stderr, flush=True)

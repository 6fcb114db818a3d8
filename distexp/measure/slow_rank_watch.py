"""Time that a rank's steps wait for other ranks, measured without a profiler and without synchronizing a step.

Every rank of a synchronous training has the same step time, because the fast ones wait for the slow one. So the step
time without this wait, the own time, shows which rank is slow. A rank waits at four places:

- ``Work.wait`` of a collective;
- on a GPU: if the stream of the computation waits for another stream, as FSDP and DeepSpeed do;
- on a GPU: in a synchronous collective, which runs in the stream of the computation, as those of DeepSpeed's ZeRO-2;
- at the end of a backward pass of DDP, whose reducer is not written in Python.

On a CPU, the time without a core does not count either, because other programs cause it. On a GPU each wait is between
two CUDA events, which are read when the GPU has passed them.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distexp.distributed.context import Context
from distexp.measure.watcher import Method, MethodReplacements
from distexp.system.torch_internals.tensors import queue_backward_callback

# Methods of a process group that ``torch.distributed`` calls. Without ``async_op`` they return no ``Work``.
COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier"),
    *("allgather", "_allgather_base", "allgather_into_tensor_coalesced", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base"),
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single"),
)
MAX_STEPS = 256  # the latest steps that are kept


class SlowRankWatch:
    """Waiting time of the measured steps of one rank. With one worker it does nothing.

    If ``measure.slow_ranks`` is false, no hook is registered and no method of torch is replaced.
    """

    def __init__(self, context: Context, *, enabled: bool = True) -> None:
        self.on_gpu = context.device.type == "cuda"
        # ``metrics.slow_rank_watch`` of the record.
        self.state = "one worker" if context.world_size == 1 else "on" if enabled else "off"
        self.enabled = self.state == "on"
        # Returns whether a measured step is watched, by its number.
        # All ranks watch the same steps, because their times are compared step by step.
        self.is_due: Callable[[int], bool] = lambda _: True
        if self.on_gpu:
            # FSDP waits 50 times a step, and each time costs some microseconds of the CPU.
            self.is_due = lambda step: step % (2 if step < 32 else 8) == 0
        self.watching = False
        self.steps = 0  # measured steps
        self._stream = torch.cuda.current_stream(context.device) if self.on_gpu and self.enabled else None
        self._thread = threading.get_ident()
        self._pairs: dict[int, list[tuple[Any, Any]]] = {}  # start and end of each wait, by measured step
        self._waits_s: dict[int, float] = {}
        self._without_core_s: dict[int, float] = {}
        self._current: list[tuple[Any, Any]] = []
        self._nested = False  # inside another wait
        self._scheduler = SchedulerDelay()
        self._delay_s = 0.0  # of the scheduler, at the start of the step and then outside of the waits
        self._replacements = MethodReplacements()

    def follow(self, module: nn.Module) -> None:
        """Follow the backward passes of a module, if it is DDP. Call it once, before the training."""
        if self.enabled and isinstance(module, nn.parallel.DistributedDataParallel):
            module.register_forward_hook(self._after_forward)

    def start_step(self, *, measured: bool) -> None:
        """Start to watch the next step, if it is measured and due. It may follow anything, such as an evaluation."""
        self.watching = self.enabled and measured and self.is_due(self.steps)
        if not self.watching:
            self.stop()
            return
        self._current = []
        if not self._replacements.active:  # To replace them again in each step of a CPU took 0.04 ms.
            self._replace_waits()
        self._delay_s = self._read_delay()

    def end_step(self, *, measured: bool) -> None:
        """Keep the waits of a watched step that has ended. Call it before the clock marks the end of the step."""
        if self.watching and measured:
            if not self.on_gpu:
                self._without_core_s[self.steps] = without_core = self._read_delay() - self._delay_s
                self._current.append((0.0, without_core))
            self._pairs[self.steps] = self._current
            self._read_finished()
        self.watching = False
        self.steps += measured

    def waits_s(self) -> dict[int, float]:
        """Return the seconds of waiting of each watched step, by its number. On a GPU, synchronize it before."""
        self.stop()
        self._read_finished()
        return self._waits_s

    def without_core_s(self, step: int) -> float:
        """Return the time of a watched step outside of the waits in which other programs had the core; 0 on a GPU."""
        return self._without_core_s.get(step, 0.0)

    def stop(self) -> None:
        """Stop watching, and restore the methods of torch."""
        self.watching = False
        self._replacements.restore()

    def _replace_waits(self) -> None:
        replace = self._replacements.replace
        replace(dist.Work, "wait", partial(self._timed, counts=self._computes_here))
        if self.on_gpu:
            on_stream = partial(self._timed, counts=lambda stream: stream == self._stream)
            replace(torch.cuda.Stream, "wait_event", on_stream)
            replace(torch.cuda.Stream, "synchronize", partial(self._timed, counts=lambda _: True))
            for name in COLLECTIVES:
                if hasattr(dist.ProcessGroup, name):
                    replace(dist.ProcessGroup, name, partial(self._timed, counts=self._computes_here))

    def _timed(self, original: Method, *, counts: Callable[[Any], bool]) -> Method:
        """Return a method that also measures its time if ``counts`` returns true for its object."""

        def measure(this: Any, *arguments: Any, **keywords: Any) -> Any:
            if not self.watching or self._nested or not counts(this):
                return original(this, *arguments, **keywords)
            start = self._enter()
            try:
                return original(this, *arguments, **keywords)
            finally:
                self._leave(start)

        return measure

    def _computes_here(self, _: Any) -> bool:
        """Return whether the caller is the stream of the computation, or on a CPU its thread."""
        if self.on_gpu:
            return bool(torch.cuda.current_stream() == self._stream)
        return threading.get_ident() == self._thread

    def _after_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        tensor = next(_differentiable(output), None) if self.watching else None
        if tensor is not None:
            # Callbacks run after the last gradient, in the order of this queue. DDP adds its own later.
            tensor.register_hook(lambda _: queue_backward_callback(self._before_reduction))  # type: ignore[no-untyped-call]

    def _before_reduction(self) -> None:
        if not self._nested:
            start = self._enter()
            queue_backward_callback(lambda: self._leave(start))

    def _enter(self) -> tuple[Any, float]:
        self._nested = True
        return self._now(), self._read_delay()

    def _leave(self, start: tuple[Any, float]) -> None:
        self._current.append((start[0], self._now()))
        self._delay_s += self._read_delay() - start[1]
        self._nested = False

    def _read_delay(self) -> float:
        return 0.0 if self.on_gpu else self._scheduler.read_s()

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def _read_finished(self) -> None:
        """Add up the waits of the steps that the device has passed."""
        for step in list(self._pairs):
            pairs = self._pairs[step]
            if self.on_gpu and pairs and not pairs[-1][1].query():  # all of them are on one stream
                return
            finished = self._pairs.pop(step)
            waits = (start.elapsed_time(end) / 1000 if self.on_gpu else end - start for start, end in finished)
            self._waits_s[step] = sum(waits)
            if len(self._waits_s) > MAX_STEPS:
                oldest = next(iter(self._waits_s))
                del self._waits_s[oldest]
                self._without_core_s.pop(oldest, None)


def _differentiable(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of a model's output that have a gradient."""
    if isinstance(output, Tensor):
        if output.requires_grad:
            yield output
        return
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (list, tuple)) else ()
    for value in values:
        yield from _differentiable(value)


SCHEDSTAT = "/proc/thread-self/schedstat"  # statistics of the scheduler about the thread that opens the file


class SchedulerDelay:
    """Time that the thread of the first reading was ready without a core, because other programs had it.

    So on a CPU it is not part of the own time of a rank. The file stays open, because it is read twice in each wait.
    """

    def __init__(self, path: str = SCHEDSTAT) -> None:
        self._path = path
        self._file: int | None = None
        self._delay_s = 0.0
        self.is_readable = True  # false once a reading failed

    def read_s(self) -> float:
        """Return the seconds so far; 0 if the kernel does not count them, which is printed once."""
        if self.is_readable:
            try:
                self._delay_s = self._read_ns() / 1e9
            except (OSError, ValueError) as error:
                self.is_readable = False
                consequence = "the own time of this rank contains the time in which other programs have its core"
                _print_once(f"note: {self._path} has no times ({error}), so {consequence}")
        return self._delay_s

    def _read_ns(self) -> int:
        if self._file is None:
            self._file = os.open(self._path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
        content = os.pread(self._file, 128, 0)
        times = list(map(int, content.split()))  # on a core, ready without a core (both ns), times on a core
        if len(times) != 3 or not any(times):  # A kernel without these statistics writes zeros.
            raise ValueError(f"content {content!r}")
        return times[1]


@cache
def _print_once(text: str) -> None:
    print(text, flush=True)

"""Memory of one rank: its tensors by part, the peaks of the allocator, and the report if an allocation fails."""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from distexp.distributed.process_group import gather_to_all, sum_over_ranks
from distexp.exceptions import text_of
from distexp.measure.memory.step_parts import COMMUNICATION, Frame, is_communication, specific_frames
from distexp.measure.memory.step_recording import (
    SavedTensorCounter,
    StepRecording,
    UsedBlock,
    has_history,
    known_parts,
    storage_sizes,
    used_blocks,
)
from distexp.measure.watcher import PROFILE, MeasuredSteps, Step, Watcher
from distexp.runs.texts import out_of_memory_status
from distexp.strategies.optimizer import ModelTensors, ReadTensors
from distexp.system.torch_internals.tensors import on_out_of_memory, start_memory_history, stop_memory_history
from distexp.system.units import MIB


class PartsWatch(Watcher):
    """Sizes of the parts, read from the tensors in the first step, which is not timed.

    Parameters and gradients are those between the backward pass and the update. ``make_recording`` makes the recording
    of the step before the profiled ones; it is None if the device has none.
    """

    section = "memory"

    def __init__(
        self, rank: int, *, counts_activations: bool, make_recording: Callable[[], StepRecording] | None = None
    ) -> None:
        self.rank, self.counts_activations, self.make_recording = rank, counts_activations, make_recording
        self.read: ReadTensors | None = None
        self.parameters: int | None = None  # bytes
        self.gradients: int | None = None
        self.optimizer_states: int | None = None
        self.recording: StepRecording | None = None
        self.peaks: list[dict[str, Any]] = []  # of the recorded step
        self._module: nn.Module | None = None
        self._counter: SavedTensorCounter | None = None
        self._counting = ExitStack()

    def follow(self, module: nn.Module, read: ReadTensors) -> None:
        """Keep the model."""
        self._module, self.read = module, read

    def start_steps(self, phase: str) -> None:
        """Record the first step of the phase ``profile``, which is not timed."""
        if phase == PROFILE and self.make_recording is not None and self.read is not None:
            self.recording, self.make_recording = self.make_recording(), None
            self.recording.start(self.read)

    def start_forward(self) -> None:
        """Mark the start of a micro-batch. In the first step, start to count activations."""
        if self.recording is not None:
            self.recording.start_forward()
        if self._counter is None and self.counts_activations and self._module is not None:
            self._counter = SavedTensorCounter()
            self._counting.enter_context(self._counter.count(self._module))

    def before_update(self) -> None:
        """Measure parameters and gradients, once."""
        if self.recording is not None:
            self.recording.start_update()
        if self.read is None or self.parameters is not None:
            return
        self._counting.close()
        tensors = self.read()
        parameters = storage_sizes(iter(tensors.parameters))
        self.parameters = sum(parameters.values())
        self.gradients = _size_outside(parameters, tensors.gradients)

    def after_step(self, step: Step) -> None:
        """Measure the optimizer states after the first update, and read the recording if there is one.

        With fp16 the loss scaling may skip the first updates, so the next ones are measured until one is timed.
        """
        if self.read is not None and not (self.optimizer_states or (step.measured and self.optimizer_states == 0)):
            tensors = self.read()
            self.optimizer_states = _size_outside(storage_sizes(iter(tensors.parameters)), tensors.optimizer_states)
        if self.recording is not None:
            recording, self.recording = self.recording, None
            self.peaks = recording.finish()
            # Ranks that read their recording longer would make the others wait in the first profiled step.
            sum_over_ranks(torch.zeros(1, device=recording.device)).item()

    def stop(self) -> None:
        """End what has not ended, because the training stopped in that step."""
        self._counting.close()
        if self.recording is not None:
            self.recording.cancel()
            self.recording = None

    def summary(self, steps: MeasuredSteps) -> dict[str, Any]:
        """Return ``memory.parts`` of all ranks. A collective."""
        return {"parts": [entry for entries in gather_to_all(self.entries()) for entry in entries]}

    def entries(self) -> list[dict[str, Any]]:
        """Return the entries of this rank in MiB: the tensors, then the peaks of the recorded step."""
        if self.parameters is None:
            return []
        sizes = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer_states": self.optimizer_states,
            "activations": None if self._counter is None else self._counter.peak_bytes,
        }
        tensors = {f"{part}_mib": None if size is None else size / MIB for part, size in sizes.items()}
        return [{"rank": self.rank, **entry} for entry in ({"phase": "train", **tensors}, *self.peaks)]


def _size_outside(parameters: Mapping[int, int], tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors that share no storage with parameters."""
    return sum(size for key, size in storage_sizes(iter(tensors)).items() if key not in parameters)


class AllocatorWatch(Watcher):
    """Samples of allocated memory after each step and before each update, and the allocator's peaks."""

    section = "memory"

    def __init__(self, device: torch.device, rank: int) -> None:
        self.device, self.rank = device, rank
        self.total = self.samples = self.states = 0
        self._kept: dict[str, Any] = {}  # peaks before they were reset

    def before_update(self) -> None:
        """Record the allocated memory: model states, gradients and buffers, but no activations."""
        if self.device.type == "cuda":
            self.states = torch.cuda.memory_allocated(self.device)

    def after_step(self, step: Step) -> None:
        """Record the allocated memory; takes microseconds and does not synchronize."""
        if self.device.type == "cuda":
            self.total += torch.cuda.memory_allocated(self.device)
            self.samples += 1

    def keep_peaks(self) -> None:
        """Keep the peaks, which are about to be reset."""
        self._kept = self._peaks()

    def _peaks(self) -> dict[str, Any]:
        peaks, names = allocator_peaks(self.device, self.rank), ("peak_allocated_mib", "peak_reserved_mib")
        return peaks | {name: max(peaks[name], self._kept.get(name, 0.0)) for name in names}

    def summary(self, steps: MeasuredSteps) -> dict[str, Any]:
        """Return ``memory.torch`` in MiB, which is empty on the CPU. A collective."""
        return {"torch": [entry for entry in gather_to_all(self._entry()) if entry is not None]}

    def _entry(self) -> dict[str, Any] | None:
        if self.device.type != "cuda":
            return None
        average = self.total / self.samples / MIB if self.samples else None
        states = self.states / MIB if self.samples > 1 else None  # the first update creates the optimizer states
        return {**self._peaks(), "average_allocated_mib": average, "states_mib": states}


def allocator_peaks(device: torch.device, rank: int) -> dict[str, Any]:
    """Return the allocator's peaks in MiB since the process started, or since the last reset."""
    statistics = torch.cuda.memory_stats(device)
    return {
        "rank": rank,
        "peak_allocated_mib": statistics["allocated_bytes.all.peak"] / MIB,
        "average_allocated_mib": None,
        "states_mib": None,
        "peak_reserved_mib": statistics["reserved_bytes.all.peak"] / MIB,
        "alloc_retries": statistics["num_alloc_retries"],
    }


MAX_TENSORS = 8  # kinds of tensors that the record lists, the largest first


class OutOfMemoryWatch(Watcher):
    """Keeps a report of the latest allocation that failed, also while the model is built.

    With ``records_stacks`` it has source lines, from the first step, which must then count in no metric.
    """

    def __init__(self, device: torch.device, *, records_stacks: bool = False) -> None:
        self.device = device
        self.read: ReadTensors | None = None
        self.report: dict[str, Any] | None = None
        self._records_stacks, self._recording = records_stacks and has_history(device), False
        if has_history(device):
            if not _watches:  # torch cannot remove an observer
                on_out_of_memory(_observe)
            _watches[:] = [self]

    def follow(self, module: nn.Module, read: ReadTensors) -> None:
        """Describe the tensors of the model in a report."""
        self.read = read

    def start(self, done: int) -> None:
        """Record the stacks. Blocks in use keep theirs, so the history needs no entries."""
        if self._records_stacks:
            self._recording = True
            start_memory_history(1)

    def end_step(self, step: Step) -> None:
        """End the recording after the first step."""
        if self._recording:
            self.stop()

    def stop(self) -> None:
        """End the recording."""
        if self._recording:
            self._recording = False
            stop_memory_history(self.device.index or 0)

    def observe(self, device: int, requested: int, total: int, free: int) -> None:
        """Keep a report; torch calls this before it raises the error, and an error here would replace that one."""
        try:
            segments: Any = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            tensors = None if self.read is None else self.read()
            reserved = torch.cuda.memory_reserved(device)
            self.report = {
                "requested_mib": requested / MIB,
                "allocated_mib": torch.cuda.memory_allocated(device) / MIB,
                "reserved_mib": reserved / MIB,
                "free_mib": min(free, total - reserved) / MIB,  # With a limit, torch passes it as the total.
                "total_mib": total / MIB,
                **describe_blocks(used_blocks(segments, device), tensors, running_frames()),
            }
        except Exception as error:
            print(f"note: the memory is not described: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


_watches: list[OutOfMemoryWatch] = []  # the watch of the latest training of this process


def _observe(device: int, requested: int, total: int, free: int) -> None:
    _watches[0].observe(device, requested, total, free)


def report_of(error: BaseException) -> dict[str, Any] | None:
    """Return the report of the allocation that an error is about; None for another error."""
    is_full = out_of_memory_status(type(error).__name__, text_of(error)) == "oom_gpu"
    return _watches[0].report if _watches and is_full else None


def running_frames() -> list[FrameType]:
    """Return the calls that run in this thread and in the main thread, the innermost one first."""
    main = threading.main_thread().ident
    threads = [sys._getframe(1)]
    if main is not None and main != threading.get_ident():  # The backward pass has its own thread.
        threads.append(sys._current_frames()[main])
    calls = [frame for innermost in threads for frame, _ in walk_stack(innermost)]
    return [frame for frame in calls if frame.f_code.co_filename != __file__]


def describe_blocks(
    blocks: Sequence[UsedBlock], tensors: ModelTensors | None, frames: Sequence[FrameType]
) -> dict[str, Any]:
    """Return the line that runs, the memory by part, and the largest tensors. ``rest`` has activations."""
    parts = known_parts(tensors, blocks) if tensors is not None else {}
    others = "unknown" if tensors is None else "rest"
    names = {**dict(_variables(frames)), **(dict(_names(tensors)) if tensors is not None else {})}
    sizes: Counter[str] = Counter()
    groups: Counter[tuple[int, str, str | None]] = Counter()
    for block in blocks:
        part = parts.get(block.address) or (COMMUNICATION if is_communication(block.frames) else others)
        sizes[part] += block.size
        groups[block.size, part, names.get(block.address) or _line(block.frames)] += 1
    largest = sorted(groups.items(), key=lambda item: -item[0][0])[:MAX_TENSORS]
    return {
        "line": _line([_as_frame(frame) for frame in frames]),
        "parts": {f"{part}_mib": size / MIB for part, size in sizes.items()},
        "largest": [
            {"mib": size / MIB, "count": count, "part": part, "line": line} for (size, part, line), count in largest
        ],
    }


def _names(tensors: ModelTensors) -> Iterator[tuple[int, str]]:
    """Yield address and name of parameters and their gradients."""
    for parameter in tensors.parameters:
        name = tensors.names.get(id(parameter))
        if name is not None:
            yield from ((address, name) for address in storage_sizes(iter([parameter])))
            if isinstance(gradient := parameter.grad, Tensor):
                yield from ((address, f"gradient of {name}") for address in storage_sizes(iter([gradient])))


def _variables(frames: Sequence[FrameType]) -> Iterator[tuple[int, str]]:
    """Yield address and name of the tensors in local variables; the innermost call comes last, and so counts."""
    for frame in reversed(frames):
        place = format_frame(_as_frame(frame))
        for name, value in list(frame.f_locals.items()):
            for tensor in _tensors_of(value):
                yield from ((address, f"{name} in {place}") for address in storage_sizes(iter([tensor])))


def _tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield a tensor, or the tensors that a mapping or a sequence contains directly."""
    members = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return (member for member in list(members) if isinstance(member, Tensor) and member.layout == torch.strided)


def _line(frames: Sequence[Frame]) -> str | None:
    """Return the innermost line outside of torch's general code; None if there is none."""
    return next(map(format_frame, specific_frames(frames)), None)


def _as_frame(frame: FrameType) -> Frame:
    return Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def format_frame(frame: Frame) -> str:
    """Return a place in the code: ``transformers/models/bloom/modeling_bloom.py:301 in forward``."""
    file = frame.file.rpartition("/site-packages/")[2]
    if "/distexp/" in file:
        file = f"distexp/{file.rpartition('/distexp/')[2]}"
    return f"{file}:{frame.line} in {frame.function}"

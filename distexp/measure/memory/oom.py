"""What is in GPU memory when an allocation fails, for ``error.memory`` of a record."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from distexp.measure.memory.model_tensors import ModelTensors, ReadTensors
from distexp.measure.memory.saved_tensors import storage_sizes
from distexp.measure.memory.step_parts import COMMUNICATION, Frame, is_communication, specific_frames
from distexp.measure.memory.step_recording import ALLOCATED, frames_of, has_history, known_parts
from distexp.measure.watcher import Step, Watcher
from distexp.runs.out_of_memory import out_of_memory_status
from distexp.system.torch_internals.memory import on_out_of_memory, start_memory_history, stop_memory_history
from distexp.system.units import MIB

MAX_TENSORS = 8
"""Kinds of tensors that the record lists, the largest first."""

REST, UNKNOWN = "rest", "unknown"
"""Activations and temporaries, which only a recorded step separates; and all memory while there is no model."""


@dataclass(frozen=True)
class UsedBlock:
    """A block of memory in use."""

    address: int
    size: int
    frames: tuple[Frame, ...] = ()
    requested: int = 0


class OutOfMemoryWatch(Watcher):
    """Keeps a report of the latest allocation of this process that failed, also while the model is built.

    Args:
        device: the device. On a CPU there is no report.
        records_stacks: whether to record the Python stacks of the first step's allocations, so that a report has
            source lines. The first step must count in no metric.
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


_watches: list[OutOfMemoryWatch] = []
"""The watch of the latest training of this process."""


def _observe(device: int, requested: int, total: int, free: int) -> None:
    _watches[0].observe(device, requested, total, free)


def report_of(error: BaseException) -> dict[str, Any] | None:
    """Return the report of the allocation that an error is about; None for another error."""
    is_full = out_of_memory_status(type(error).__name__, str(error)) == "oom_gpu"
    return _watches[0].report if _watches and is_full else None


def used_blocks(segments: Iterable[Mapping[str, Any]], device: int) -> Iterator[UsedBlock]:
    """Yield the blocks in use in a snapshot of torch."""
    for segment in segments:
        if segment["device"] == device:
            for block in segment["blocks"]:
                if block["state"] == ALLOCATED:
                    yield UsedBlock(block["address"], block["size"], frames_of(block), block.get("requested_size", 0))


def running_frames() -> list[FrameType]:
    """Return the calls that run in this thread and in the main thread, the innermost one first."""
    main = threading.main_thread().ident
    threads = [sys._getframe(1)]
    if main is not None and main != threading.get_ident():  # The backward pass has its own thread.
        threads.append(sys._current_frames()[main])
    return [frame for innermost in threads for frame in _callers(innermost)]


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            yield frame
        frame = frame.f_back


def describe_blocks(
    blocks: Iterable[UsedBlock], tensors: ModelTensors | None, running: Iterable[FrameType]
) -> dict[str, Any]:
    """Return the line that runs, the memory by part, and the largest tensors.

    Args:
        blocks: the blocks in use.
        tensors: the tensors of the model; None if there is none.
        running: the calls that run.
    """
    frames, blocks = list(running), list(blocks)
    sizes_of = {block.address: (block.size, block.requested) for block in blocks}
    parts = known_parts(tensors, sizes_of) if tensors is not None else {}
    others = UNKNOWN if tensors is None else REST
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


def _variables(frames: Iterable[FrameType]) -> Iterator[tuple[int, str]]:
    """Yield address and name of the tensors in local variables; the innermost call comes last, and so counts."""
    for frame in reversed(list(frames)):
        place = format_frame(_as_frame(frame))
        for name, value in list(frame.f_locals.items()):
            for tensor in _tensors_of(value):
                yield from ((address, f"{name} in {place}") for address in storage_sizes(iter([tensor])))


def _tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield a tensor, or the tensors that a mapping or a sequence contains directly."""
    members = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return (member for member in list(members) if isinstance(member, Tensor) and member.layout == torch.strided)


def _line(frames: Iterable[Frame]) -> str | None:
    """Return the innermost line outside of torch's general code; None if there is none."""
    frame = next(specific_frames(list(frames)), None)
    return None if frame is None else format_frame(frame)


def _as_frame(frame: FrameType) -> Frame:
    return Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def format_frame(frame: Frame) -> str:
    """Return a place in the code: ``transformers/models/bloom/modeling_bloom.py:301 in forward``."""
    file = frame.file.rpartition("/site-packages/")[2]
    if "/distexp/" in file:
        file = f"distexp/{file.rpartition('/distexp/')[2]}"
    return f"{file}:{frame.line} in {frame.function}"

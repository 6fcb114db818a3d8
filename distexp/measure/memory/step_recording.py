"""Recording of the GPU memory of one step, and the bytes that its forward passes save for the backward passes."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from distexp.measure.memory import step_parts
from distexp.models.transforms import stored_watchers
from distexp.runs.step_files import BACKWARD, FORWARD, OPTIMIZER, PHASES
from distexp.strategies.optimizer import ModelTensors, ReadTensors
from distexp.system.cgroups import NvmlUnavailableError, nvml_session
from distexp.system.torch_internals import tensors as internals
from distexp.system.units import MIB

MAX_ENTRIES = 2_000_000  # allocations and frees that are kept; a step has some ten thousand


class StepRecording:
    """The allocations and frees of one step of this rank. A small tensor marks where a phase starts.

    ``keep_peaks`` saves the peaks of the allocator, which are reset for each phase.
    """

    def __init__(self, device: torch.device, keep_peaks: Callable[[], None]) -> None:
        self.device, self.keep_peaks = device, keep_peaks
        self.phase = ""
        self.allocated: Counter[str] = Counter()  # peak of each phase in bytes
        self.reserved: Counter[str] = Counter()
        self._stack = ExitStack()
        self._read: ReadTensors | None = None
        self._markers: list[Tensor] = []
        self._marks: list[step_parts.Mark] = []
        self._start: list[UsedBlock] = []
        self._known: dict[int, str] = {}
        self._weight_sizes: frozenset[int] = frozenset()
        self._vocabulary: int | None = None
        self._backward_depth = 0

    def start(self, read: ReadTensors) -> None:
        """Record from now on."""
        self._read, tensors = read, read()
        segments: Any = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        self._start = used_blocks(segments, self._index)
        self._known = known_parts(tensors, self._start)
        self._vocabulary = tensors.vocabulary
        self._weight_sizes = frozenset(map(count_elements, tensors.parameters))
        internals.start_memory_history(MAX_ENTRIES)
        self._stack.enter_context(internals.around_backward(self._in_backward))

    @property
    def _index(self) -> int:
        return torch.cuda.current_device() if self.device.index is None else self.device.index

    def start_forward(self) -> None:
        """Mark the start of a micro-batch."""
        self._mark(FORWARD)

    def start_update(self) -> None:
        """Mark the end of the backward pass."""
        assert self._read is not None
        self._mark(OPTIMIZER, frozenset(storage_sizes(_on_gpu(self._read().gradients))))

    def finish(self) -> list[dict[str, Any]]:
        """End the recording; return the parts at the peak of each phase, in MiB."""
        self._mark(step_parts.END)
        self._stack.close()
        changes = [
            step_parts.Change(entry["addr"], entry["size"], entry["action"] == "free_requested", frames_of(entry))
            for entry in internals.stop_memory_history(self._index)
            if entry["action"] in ("alloc", "free_requested")
        ]
        self._markers = []
        start = {block.address: block.size for block in self._start}
        step = step_parts.RecordedStep(start, self._known, changes, self._marks, self._vocabulary, self._weight_sizes)
        context = self._context() if step.knows_logits else {"logits_mib": None, **self._context()}
        return [
            entry_of(phase, parts, self.allocated[phase], self.reserved[phase]) | context
            for phase, parts in step_parts.phase_peaks(step).items()
        ]

    def cancel(self) -> None:
        """End the recording of a step that was not finished."""
        self._stack.close()
        internals.stop_memory_history(self._index)

    @contextmanager
    def _in_backward(self) -> Iterator[None]:
        """Mark the start of a backward pass. Recomputation may run others inside of it."""
        if not self._backward_depth:
            self._mark(BACKWARD)
        self._backward_depth += 1
        try:
            yield
        finally:
            self._backward_depth -= 1

    def _mark(self, phase: str, gradients: frozenset[int] = frozenset()) -> None:
        statistics = torch.cuda.memory_stats(self.device)
        if self.phase in PHASES:  # the peaks of the phase that ends
            for peaks, key in ((self.allocated, "allocated_bytes"), (self.reserved, "reserved_bytes")):
                peaks[self.phase] = max(peaks[self.phase], statistics[f"{key}.all.peak"])
        self.keep_peaks()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.phase = phase
        marker = torch.empty(1, dtype=torch.uint8, device=self.device)
        self._markers.append(marker)
        self._marks.append(step_parts.Mark(marker.untyped_storage().data_ptr(), phase, gradients))

    def _context(self) -> dict[str, Any]:
        """Return the memory that NVML reports beyond torch's reserved memory, and what NVML counted."""
        found = process_memory(torch.cuda.get_device_properties(self.device).uuid)
        if found is None:
            return {"context_mib": None, "context_source": None}
        used, source = found
        return {"context_mib": (used - torch.cuda.memory_reserved(self.device)) / MIB, "context_source": source}


def has_history(device: torch.device) -> bool:
    """Return whether torch can record the memory of a device. The backend ``cudaMallocAsync`` has no history."""
    return device.type == "cuda" and torch.cuda.get_allocator_backend() == "native"


def entry_of(phase: str, parts: Mapping[str, int], allocated: int, reserved: int) -> dict[str, Any]:
    """Return the entry of a phase in MiB. ``other_mib`` is what the parts miss, mostly the allocator's rounding."""
    return {
        "phase": phase,
        **{f"{part}_mib": parts.get(part, 0) / MIB for part in step_parts.PARTS},
        "other_mib": (allocated - sum(parts.values())) / MIB,
        "allocated_mib": allocated / MIB,
        "reserve_mib": (reserved - allocated) / MIB,
    }


@dataclass(frozen=True)
class UsedBlock:
    """A block of memory in use. Its frames are the Python stack of its allocation, if that was recorded."""

    address: int
    size: int
    frames: tuple[step_parts.Frame, ...] = ()
    requested: int = 0


def used_blocks(segments: Iterable[Mapping[str, Any]], device: int) -> list[UsedBlock]:
    """Return the blocks in use in a snapshot of torch."""
    return [
        UsedBlock(block["address"], block["size"], frames_of(block), block.get("requested_size") or block["size"])
        for segment in segments
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]


def frames_of(entry: Mapping[str, Any]) -> tuple[step_parts.Frame, ...]:
    """Return the Python stack of an allocation, the innermost call first; empty if none was recorded."""
    frames = entry.get("frames") or ()
    return tuple(step_parts.Frame(frame["filename"], frame["line"], frame["name"]) for frame in frames)


def known_parts(tensors: ModelTensors, blocks: Iterable[UsedBlock]) -> dict[int, str]:
    """Return the part of each block that has tensors of the model, by address."""
    known: dict[int, str] = {}
    parts: dict[str, Sequence[Tensor]] = {  # the first one counts if tensors share a block
        "parameters": (*tensors.parameters, *tensors.buffers),
        "optimizer_states": tensors.optimizer_states,
        "gradients": tensors.gradients,
        step_parts.COMMUNICATION: tensors.communication,
    }
    for part, members in parts.items():
        for address in storage_sizes(_on_gpu(members)):
            known.setdefault(address, part)
    buckets = Counter(tensors.bucket_sizes)
    for block in blocks:
        if block.address not in known and buckets[block.requested] > 0:
            known[block.address] = step_parts.COMMUNICATION
            buckets[block.requested] -= 1
    return known


def _on_gpu(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    return (tensor for tensor in tensors if tensor.device.type == "cuda")


def process_memory(uuid: object) -> tuple[int, str] | None:
    """Return the bytes that this process uses on a GPU, and what was counted; None if NVML does not report it.

    ``gpu`` counts all of the GPU: in a container NVML lists no processes, or those of the host's numbers.
    """
    try:
        with nvml_session() as nvml:
            return _read(nvml, f"GPU-{str(uuid).removeprefix('GPU-')}")
    except (NvmlUnavailableError, ImportError):
        return None


def _read(nvml: Any, uuid: str) -> tuple[int, str] | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        listed = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        own = [process.usedGpuMemory for process in listed if process.pid == os.getpid()]
        if own and own[0] is not None:
            return int(own[0]), "process"
        version = {"version": nvml.nvmlMemory_v2} if hasattr(nvml, "nvmlMemory_v2") else {}
        return int(nvml.nvmlDeviceGetMemoryInfo(handle, **version).used), "gpu"
    except nvml.NVMLError:
        return None


def storage_sizes(tensors: Iterator[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage of some tensors on this rank, by address. Views share one storage."""
    storages = (part.untyped_storage() for tensor in tensors for part in internals.plain_tensors(tensor))
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def count_elements(parameter: Tensor) -> int:
    """Return the elements of a whole parameter. ZeRO-3 leaves an empty tensor, and keeps the number elsewhere."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


class SavedTensorCounter:
    """Counter of the bytes that forward passes save for backward passes, without parameters, also gathered ones."""

    def __init__(self) -> None:
        self.peak_bytes = 0  # most bytes that one forward pass saved
        self._saved: set[int] = set()  # addresses of the storages of this forward pass
        self._bytes = 0  # of these storages
        self._parameters: list[set[int]] = []  # storages of the parameters of each module that runs now
        self._in_backward = False

    @contextmanager
    def count(self, module: nn.Module) -> Iterator[None]:
        """Count what is saved during the block."""
        with ExitStack() as stack:
            for submodule in module.modules():
                stack.callback(submodule.register_forward_pre_hook(self._enter).remove)
                stack.callback(submodule.register_forward_hook(self._leave, always_call=True).remove)
            stack.enter_context(saved_tensors_hooks(self._pack, self._unpack))
            stored_watchers.append(self._pack)
            stack.callback(stored_watchers.remove, self._pack)
            yield

    def _enter(self, module: nn.Module, *_: Any) -> None:
        self._parameters.append(set(storage_sizes(module.parameters())))

    def _leave(self, *_: Any) -> None:
        self._parameters.pop()

    def _pack(self, tensor: Tensor) -> Tensor:
        if self._in_backward:  # the next micro-batch, or a recomputed forward pass
            self._saved, self._bytes, self._in_backward = set(), 0, False
        sizes = storage_sizes(iter([tensor])) if tensor.layout == torch.strided else {}
        for address, size in sizes.items():
            if address not in self._saved and not any(address in parameters for parameters in self._parameters):
                self._saved.add(address)
                self._bytes += size
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        return tensor

    def _unpack(self, tensor: Tensor) -> Tensor:
        self._in_backward = True
        return tensor

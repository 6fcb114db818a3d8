"""A recorder of the storages that operations of torch create and free."""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from distexp.plan.replay import BACKWARD_WORKSPACE, EMPTY_CACHE, FORWARD_WORKSPACE, Event, StepTrace, StepWork
from distexp.plan.trace.compiled import KernelBuffers, WorkCounter, is_matrix_product
from distexp.plan.trace.cuda_semantics import count_references_to_gradient
from distexp.system.torch_internals.tensors import FakeMode, count_references, device_of_fake, is_fake_of, plain_tensors

GPU = torch.device("cpu", 1)
READ_DEVICE, WAIT = torch.ops.prim.device.default, torch.ops._c10d_functional.wait_tensor.default
"""The device of traced tensors that a run has on its GPU. Host tensors are on ``cpu``.

Autograd and FSDP need a GPU for tensors on ``cuda``. For a CPU with another index they do not, yet torch distinguishes
the two devices, copies between them, and refuses to mix them.
"""

WORKSPACE_BLOCKS = {"forward": FORWARD_WORKSPACE, "backward": BACKWARD_WORKSPACE}  # by the phase that allocates them


@dataclass
class TracedBlock:
    """One storage, from its allocation to its free."""

    number: int
    size: int  # bytes
    device: str  # ``gpu`` or ``host``
    phase: str  # of the allocation
    last_axis: int  # size of the last axis of the first tensor in it
    stream: str  # of the allocation; empty for that of the computation
    in_backward: bool  # whether the backward pass allocated it, except for the recomputation of a forward pass
    kept: bool = False  # whether it was still there at the end of the forward pass that allocated it
    part: str | None = None  # what it is for, once that is known


@dataclass(frozen=True)
class BlockChange:
    """An allocation (or a free) of a block."""

    block: TracedBlock
    phase: str
    is_free: bool


@dataclass
class _Storage:
    """A storage that is alive, and its block; None while its size is 0."""

    reference: weakref.ref[Any]
    device: str
    last_axis: int
    block: TracedBlock | None = field(default=None)


class StorageRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each birth and death of a storage of fake tensors. Views share the storage of their base."""

    def __init__(self, fake_mode: FakeMode, kernels: KernelBuffers | None = None) -> None:
        """Create a recorder of the tensors of a mode, with the buffers of the kernels; None for a CPU."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "setup"  # The caller sets it.
        self.changes: list[BlockChange] = []  # since ``start``
        self.history: list[BlockChange] = []  # before it
        self.first_products: dict[str, int] = {}  # number of changes after the first matrix product of each phase
        self.work = WorkCounter()  # since ``start``
        self._kernels = kernels
        self._fake_mode = fake_mode
        self._storages: dict[int, _Storage] = {}  # by the address of the storage object
        self._alive: set[int] = set()  # numbers of their blocks
        self._count = 0
        self._unshared = count_references_to_gradient()
        self._main_stream = torch.cpu.current_stream()
        self._forward_blocks: list[TracedBlock] = []  # of the forward pass that runs now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # The operations on the local tensors come here too.
        if self._forward_blocks and self._is_in_backward():
            self.end_forward()
        if func is READ_DEVICE and is_fake_of(args[0], self._fake_mode):  # two thirds of all calls, mostly by autograd
            return device_of_fake(args[0], self._fake_mode)
        if func is WAIT:  # Only without values its result is another tensor.
            return args[0]
        if self.phase == "backward" and self._adds_in_place(func, args):
            return args[0]
        outputs = func(*args, **(kwargs or {}))
        for tensor in tensors_in(outputs):
            if is_fake_of(tensor, self._fake_mode) and device_of_fake(tensor, self._fake_mode).type == "cpu":
                self._register(tensor)
        self.work.add(self.phase, func, args, kwargs, outputs)
        self._use_buffers(func, args)
        if func.namespace in ("fsdp", "c10d"):  # DTensors use another one, also for activations.
            self.assign("communication", tensors_in((args, kwargs, outputs)))
        return outputs

    def _adds_in_place(self, func: Any, arguments: Any) -> bool:
        """Return whether autograd would do an operation in place. It does so if only itself refers to a gradient."""
        if func is not torch.ops.aten.add.Tensor or torch.is_grad_enabled():
            return False
        old, new = arguments[:2]
        fits = isinstance(new, Tensor) and old.shape == new.shape and old.dtype == new.dtype
        return fits and count_references(old) == self._unshared

    def _use_buffers(self, func: Any, arguments: Any) -> None:
        if self._kernels is None:
            return
        if is_matrix_product(func):
            self.first_products.setdefault(self.phase, len(self.changes))
        blocks = [self._block(size, "gpu", 1) for size in self._kernels.sizes(func, arguments)]
        self.changes += [BlockChange(block, self.phase, is_free=False) for block in blocks]
        self.changes += [BlockChange(block, self.phase, is_free=True) for block in reversed(blocks)]

    def _is_in_backward(self) -> bool:
        """Return whether a backward pass runs, and not the recomputation of a checkpointed forward pass."""
        return self.phase != "forward" and not (self.phase == "backward" and torch.is_grad_enabled())

    def _register(self, tensor: Tensor) -> _Storage:
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._storages.get(key)
        if found is None:
            reference = weakref.ref(storage, lambda _: self._free(self._storages.pop(key)))
            device = "gpu" if device_of_fake(tensor, self._fake_mode) == GPU else "host"
            found = _Storage(reference, device, tensor.shape[-1] if tensor.dim() else 1)
            self._storages[key] = found
            self._allocate(found, storage.nbytes())
        return found

    def _allocate(self, storage: _Storage, size: int) -> None:
        if size:
            block = storage.block = self._block(size, storage.device, storage.last_axis)
            self._alive.add(block.number)
            self.changes.append(BlockChange(block, self.phase, is_free=False))
            if not block.in_backward:
                self._forward_blocks.append(block)

    def _block(self, size: int, device: str, last_axis: int) -> TracedBlock:
        # FSDP selects its streams also on a CPU, where they have no effect.
        current = torch.cpu.current_stream()
        stream = "" if current is self._main_stream else f"stream {id(current)}"
        self._count += 1
        return TracedBlock(self._count - 1, size, device, self.phase, last_axis, stream, self._is_in_backward())

    def _free(self, storage: _Storage) -> None:
        if storage.block is not None:
            self.changes.append(BlockChange(storage.block, self.phase, is_free=True))
            self._alive.discard(storage.block.number)
            storage.block = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record during the block, also storages that get another size, which no dispatch mode sees."""
        resize = torch.UntypedStorage.resize_

        def resize_and_record(storage: torch.UntypedStorage, size: int) -> Any:
            found = self._storages.get(storage._cdata)
            if found is not None:  # FSDP frees parameters in this way.
                self._free(found)
                self._allocate(found, size)
                if found.block is not None:
                    found.block.part = "communication"
            return resize(storage, size)

        torch.UntypedStorage.resize_ = resize_and_record  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def empty_cache(self) -> None:
        """Record that the allocator of the GPU returns its free segments."""
        block = TracedBlock(EMPTY_CACHE, 0, "gpu", self.phase, 1, "", in_backward=False)
        self.changes.append(BlockChange(block, self.phase, is_free=True))

    def start(self) -> None:
        """Start with a new list of changes. Blocks that are alive become allocations of the phase ``setup``."""
        self.history = self.changes
        self.work = WorkCounter()
        alive = [storage.block for storage in self._storages.values() if storage.block]
        alive.sort(key=lambda block: block.number)
        self.changes = [BlockChange(block, "setup", is_free=False) for block in alive]
        self._forward_blocks = []

    def count(self, nodes: Iterable[fx.Node]) -> None:
        """Count the nodes of a compiled graph whose results leave a kernel."""
        for node in nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta.get("val"))
            self.work.add(self.phase, node.target, args, kwargs, node.meta.get("val"))

    def step_work(self, micro_batches: int, most_traced: int) -> StepWork:
        """Return the work since ``start`` for a step of some micro-batches, of which at most some were traced."""
        written: Counter[str] = Counter()
        for change in self.changes:
            if not change.is_free:
                written[change.phase] += change.block.size
        return self.work.step(micro_batches, min(micro_batches, most_traced), written)

    def trace(self, end: int, vocabulary: int | None, workspace: int) -> StepTrace:
        """Return the events before the step, those of the step, and those of an evaluation, which starts at ``end``.

        ``vocabulary`` is None for image models. ``workspace`` are the bytes of a workspace of cuBLAS.
        """

        def event(change: BlockChange) -> Event:
            block = change.block
            part = block.part or ("activations" if block.kept else "temporaries")
            if block.part is None and vocabulary is not None and block.last_axis == vocabulary:
                part = "logits"
            size = -block.size if change.is_free else block.size
            return Event(size, block.number, part, change.phase, block.device, block.stream)

        def workspace_of(phase: str, allocated_in: str) -> Event:
            return Event(workspace, WORKSPACE_BLOCKS[phase], "temporaries", allocated_in, "gpu")

        history, missing = [], set(WORKSPACE_BLOCKS)
        for position, change in enumerate(self.history):
            # A phase allocates its workspace at its first matrix product.
            if change.phase in missing and position >= self.first_products.get(change.phase, 0):
                missing.remove(change.phase)
                history.append(workspace_of(change.phase, change.phase))
            history.append(event(change))
        setup = [workspace_of(phase, "setup") for phase in WORKSPACE_BLOCKS]
        step, evaluation = map(event, self.changes[:end]), map(event, self.changes[end:])
        return StepTrace((*setup, *step), history=tuple(history), evaluation=tuple(evaluation))

    def end_forward(self) -> None:
        """Mark the blocks of the forward pass that are still alive."""
        for block in self._forward_blocks:
            block.kept = block.kept or block.number in self._alive
        self._forward_blocks = []

    def label_gradients(self, start: int) -> None:
        """Label what the backward pass left of the blocks allocated at or after position ``start`` of ``changes``."""
        born = {id(change.block) for change in self.changes[start:] if not change.is_free}
        for block in [storage.block for storage in self._storages.values() if id(storage.block) in born]:
            if block is not None and block.in_backward and block.part in (None, "communication"):
                block.part = "gradients"

    def assign(self, part: str, tensors: Iterable[Tensor]) -> None:
        """Set the part of the blocks of some tensors, unless they have one."""
        for tensor in tensors:
            if is_fake_of(tensor, self._fake_mode) and device_of_fake(tensor, self._fake_mode).type == "cpu":
                block = self._register(tensor).block
                if block is not None and block.part is None:
                    block.part = part


def tensors_in(content: Any) -> Iterator[Tensor]:
    """Yield the local tensors in nested containers, and the parts of those that have several."""
    for leaf in tree_iter(content):
        if isinstance(leaf, Tensor):
            yield from plain_tensors(leaf)

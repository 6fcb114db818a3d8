"""Communication hooks of DDP: how it reduces the gradients of a bucket.

DDP checks the annotations of a hook at run time, so they must not be strings.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from distexp.config import Config
from distexp.system.torch_internals.tensors import copy_tensors


class StepWeights:
    """The 16-bit copies that a module computes with for ``train.compute_weights=step``. They become its parameters.

    Under autocast, every micro-batch casts the fp32 weights again. The copies are refreshed once per optimizer step.
    The optimizer updates the fp32 weights, and checkpoints and exported models contain them.

    The gradients of a micro-batch have the type of the copies. They are added to fp32 gradients of the fp32 weights, so
    that accumulation loses no digits. A copy costs 2 bytes per parameter, and the gradients of one micro-batch 2 more.

    Batch norms keep their fp32 weights, because their statistics are in fp32 too. A weight that several modules share
    has one copy, which they share.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._masters: dict[int, nn.Parameter] = {}  # by the id of the copy
        self._copies: dict[int, nn.Parameter] = {}  # by the id of the fp32 weight
        self._owners: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        for owner in module.modules():
            if isinstance(owner, _BatchNorm):
                continue
            for name, master in owner.named_parameters(recurse=False, remove_duplicate=False):
                has_type = master.dtype == dtype and not master.requires_grad  # a frozen weight may be in 16 bits
                if master.is_floating_point() and not has_type:
                    self._owners.append((owner, name, master, self._shared_copy(master)))
        self._install(copies=True)

    def _shared_copy(self, master: nn.Parameter) -> nn.Parameter:
        if id(master) not in self._copies:
            copy = nn.Parameter(master.detach().to(self.dtype, copy=True), requires_grad=master.requires_grad)
            self._copies[id(master)], self._masters[id(copy)] = copy, master
        return self._copies[id(master)]

    def _install(self, *, copies: bool) -> None:
        for owner, name, master, copy in self._owners:
            setattr(owner, name, copy if copies else master)

    @contextmanager
    def masters(self) -> Iterator[None]:
        """Give the fp32 weights to the module, during the block."""
        self._install(copies=False)
        try:
            yield
        finally:
            self._install(copies=True)

    def refresh(self) -> None:
        """Set the copies to the rounded weights."""
        pairs = [(copy, self._masters[id(copy)]) for copy in self._copies.values()]
        with torch.no_grad():
            copy_tensors([copy for copy, _ in pairs], [master for _, master in pairs])

    def free_gradients(self) -> None:
        """Free the gradients of the copies."""
        for copy in self._copies.values():
            copy.grad = None

    def master_of(self, parameter: Tensor) -> nn.Parameter | None:
        """Return the fp32 weight of a copy; None if the parameter is no copy."""
        return self._masters.get(id(parameter))

    def copy_of(self, master: Tensor) -> nn.Parameter | None:
        """Return the copy of an fp32 weight; None if it has none."""
        return self._copies.get(id(master))

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Add the gradients of the copies to those of the fp32 weights, and free them."""
        for copy in self._copies.values():
            if copy.grad is not None:
                master = self._masters[id(copy)]
                if master.grad is None:
                    master.grad = copy.grad.to(master.dtype, copy=True)
                else:
                    master.grad.add_(copy.grad)
                copy.grad = None


def copy_weights(module: nn.Module, config: Config) -> StepWeights | None:
    """Give a module 16-bit copies of its weights, if ``train.compute_weights=step``."""
    return StepWeights(module, torch.bfloat16) if config.train.compute_weights == "step" else None


GradBucket: TypeAlias = dist.GradBucket  # type: ignore[name-defined, attr-defined]  # torch's stubs lack it


@dataclass
class MasterReduction:
    """The state of the hooks that reduce the gradients of fp32 weights."""

    group: Any  # the workers
    weights: StepWeights  # the fp32 weights and their 16-bit copies
    started: list[dist.Work] = field(default_factory=list)  # reductions in fp32 of this backward pass

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Run a backward pass in the block, and free what its reductions keep.

        NCCL keeps the tensors of a reduction until ``wait``, or until its watchdog notices the end, up to 100 ms
        later. Then the fp32 gradients of two steps would be in memory.
        """
        yield
        for work in self.started:
            work.wait()
        self.started.clear()


def set_reduction(
    wrapped: DistributedDataParallel, communication: str, weights: StepWeights | None
) -> MasterReduction | None:
    """Set the hook of DDP, if needed. Return its state if it reduces the gradients of fp32 weights."""
    if weights is not None:
        state = MasterReduction(wrapped.process_group, weights)
        wrapped.register_comm_hook(state, reduce_masters_in_bf16 if communication == "bf16" else reduce_masters_in_fp32)
        return state
    if communication == "bf16":
        wrapped.register_comm_hook(wrapped.process_group, reduce_in_bf16)
    return None


def reduce_in_bf16(group: Any, bucket: GradBucket) -> Future[Tensor]:
    """Reduce the gradients of a bucket in bf16. DDP refuses torch's own hook by its name if torch has no CUDA."""
    return default_hooks.bf16_compress_hook(group, bucket)


def reduce_masters_in_fp32(state: MasterReduction, bucket: GradBucket) -> Future[Tensor]:
    """Reduce the gradients of the fp32 weights of a bucket."""

    def average(group: Any, bucket: GradBucket) -> Future[Tensor]:
        """Average a bucket over the workers, as torch's ``allreduce_hook``, which keeps no handle of the reduction."""
        flat = bucket.buffer().div_(group.size())
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None, "an operation in the background has a handle"
        state.started.append(work)
        averaged: Future[Tensor] = work.get_future().then(lambda _: flat)
        return averaged

    return _reduce_masters(state, bucket, average)


def reduce_masters_in_bf16(state: MasterReduction, bucket: GradBucket) -> Future[Tensor]:
    """Reduce the gradients of the fp32 weights of a bucket in bf16."""
    return _reduce_masters(state, bucket, default_hooks.bf16_compress_hook)


def _reduce_masters(state: MasterReduction, bucket: GradBucket, reduce: Any) -> Future[Tensor]:
    """Add the gradients of a bucket to those of the fp32 weights, and reduce the sum.

    The bucket has the gradients of the last micro-batch. ``collect_gradients`` has summed those of the earlier ones.
    DDP gets its bucket back unchanged.
    """
    masters = [state.weights.master_of(parameter) for parameter in bucket.parameters()]
    known = [master for master in masters if master is not None]
    if len(known) < len(masters):  # weights without copies; DDP puts each data type into its own buckets
        reduced: Future[Tensor] = reduce(state.group, bucket)
        return reduced
    flat = add_to_masters(known, bucket.gradients(), bucket.buffer())
    pending: Future[Tensor] = reduce(state.group, SimpleNamespace(buffer=lambda: flat))  # all that a hook reads
    unchanged = bucket.buffer()
    return pending.then(lambda _: unchanged)


def add_to_masters(masters: list[nn.Parameter], gradients: list[Tensor], buffer: Tensor) -> Tensor:
    """Add the gradients of a bucket to those of the fp32 weights, which become views of the flat result."""
    flat = buffer.to(torch.float32, copy=True)
    for master, gradient in zip(masters, gradients, strict=True):
        offset = gradient.storage_offset() - buffer.storage_offset()
        view = flat.as_strided(gradient.size(), gradient.stride(), offset)
        if master.grad is not None:
            view.add_(master.grad)
        master.grad = view
    return flat

"""Communication hooks of DDP: how it reduces the gradients of a bucket.

DDP checks the annotations of a hook at run time, so they must not be strings.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from distexp.strategies.compute_weights import StepWeights

GradBucket: TypeAlias = dist.GradBucket  # type: ignore[name-defined, attr-defined]  # torch's stubs lack it


@dataclass
class MasterReduction:
    """The state of the hooks that reduce the gradients of fp32 weights.

    Attributes:
        group: The workers.
        weights: The fp32 weights and their 16-bit copies.
        started: Reductions in fp32 of this backward pass.
    """

    group: Any
    weights: StepWeights
    started: list[dist.Work] = field(default_factory=list)

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
    """Set the hook of DDP, unless it reduces in its own way.

    Args:
        wrapped: the module in DDP.
        communication: ``fp32`` or ``bf16``.
        weights: the 16-bit copies that DDP sees, if the gradients of fp32 weights are to be reduced.

    Returns:
        The state of the hook that reduces the gradients of fp32 weights; None for another one.
    """
    if weights is not None:
        state = MasterReduction(wrapped.process_group, weights)
        wrapped.register_comm_hook(state, reduce_masters_in_bf16 if communication == "bf16" else reduce_masters_in_fp32)
        return state
    if communication == "bf16":
        wrapped.register_comm_hook(wrapped.process_group, reduce_in_bf16)
    return None


def reduce_in_bf16(group: Any, bucket: GradBucket) -> Future[Tensor]:
    """Reduce the gradients of a bucket in bf16."""
    return default_hooks.bf16_compress_hook(group, bucket)


def reduce_masters_in_fp32(state: MasterReduction, bucket: GradBucket) -> Future[Tensor]:
    """Reduce the gradients of the fp32 weights of a bucket."""
    return _reduce_masters(state, bucket, partial(_average, state))


def reduce_masters_in_bf16(state: MasterReduction, bucket: GradBucket) -> Future[Tensor]:
    """Reduce the gradients of the fp32 weights of a bucket in bf16."""
    return _reduce_masters(state, bucket, default_hooks.bf16_compress_hook)


def _average(state: MasterReduction, group: Any, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket over the workers, as torch's ``allreduce_hook``, which keeps no handle of the reduction."""
    flat = bucket.buffer().div_(group.size())
    work = dist.all_reduce(flat, group=group, async_op=True)
    assert work is not None, "an operation in the background has a handle"
    state.started.append(work)
    averaged: Future[Tensor] = work.get_future().then(lambda _: flat)
    return averaged


class FlatBucket:
    """The part of a bucket that the hooks of torch read."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat

    def buffer(self) -> Tensor:
        """Return the flat gradients."""
        return self._flat


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
    pending: Future[Tensor] = reduce(state.group, FlatBucket(flat))
    unchanged = bucket.buffer()
    return pending.then(lambda _: unchanged)


def add_to_masters(masters: list[nn.Parameter], gradients: list[Tensor], buffer: Tensor) -> Tensor:
    """Add the gradients of a bucket to those of the fp32 weights, which become views of the result.

    Args:
        masters: the fp32 weights of the bucket.
        gradients: their gradients of one micro-batch, as views of ``buffer``.
        buffer: the bucket.

    Returns:
        A flat fp32 tensor in the layout of the bucket.
    """
    flat = buffer.to(torch.float32, copy=True)
    for master, gradient in zip(masters, gradients, strict=True):
        offset = gradient.storage_offset() - buffer.storage_offset()
        view = flat.as_strided(gradient.size(), gradient.stride(), offset)
        if master.grad is not None:
            view.add_(master.grad)
        master.grad = view
    return flat

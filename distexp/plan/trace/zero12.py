"""The memory of ZeRO's stages 1 and 2: a model of what DeepSpeed allocates, on fake tensors.

The module runs in 16 bits, forward and backward, as in a run. Hooks take each gradient when autograd has accumulated
it, as DeepSpeed's hooks do, and allocate what DeepSpeed 0.19.8 allocates for it. Names in comments are those of
``DeepSpeedZeroOptimizer`` in ``deepspeed/runtime/zero/stage_1_and_2.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn

from distexp.config import Config
from distexp.plan.trace.cuda_semantics import make_optimizer
from distexp.plan.trace.recorder import tensors_in
from distexp.runs.memory_trace import MOMENTS
from distexp.strategies.optimizer import parameter_groups

CHECKED_VERSION = "0.19.8"  # version of DeepSpeed with which the models of ZeRO's memory were checked


def version_note() -> str | None:
    """Return a note if the installed DeepSpeed is not the one with which ZeRO's memory was checked."""
    installed = version("deepspeed").partition("+")[0]
    if installed == CHECKED_VERSION:
        return None
    return f"DeepSpeed {installed} is installed: the memory of ZeRO was checked with {CHECKED_VERSION}, and may differ"


class ShardedOptimizer(ABC):
    """An optimizer that shards its states, and takes each gradient when autograd has accumulated it."""

    def __init__(self, module: nn.Module, config: Config, settings: dict[str, Any], buffers: Buffers) -> None:
        self.buffers, self.offloads, self.is_last = buffers, config.offload.enabled, False
        self.world_size = config.cluster.world_size
        self.bucket_size = int(read_zero(settings, "reduce_bucket_size", 500_000_000))
        self.groups: list[list[nn.Parameter]] = [
            group["params"] for group in parameter_groups(module, config.train.weight_decay)
        ]
        self.params = [param for group in self.groups for param in group]
        self.dtype = self.params[0].dtype
        for param in self.params:
            param.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    @abstractmethod
    def _on_gradient(self, param: Tensor) -> None:
        """Take the gradient of a parameter."""

    @abstractmethod
    def after_backward(self) -> None:
        """Finish a micro-batch."""

    @abstractmethod
    def step(self) -> None:
        """Update the weights."""


Assign = Callable[[str, Iterable[Tensor]], None]  # sets the part of tensors, see ``distexp.plan.replay.PARTS``


@dataclass(frozen=True)
class Buffers:
    """Allocates fake tensors on the GPU and on the host."""

    gpu: torch.device  # the device that the recorder counts as the GPU
    states: torch.device  # where the optimizer states are; ``cpu`` if they are offloaded
    pinned: bool  # whether offloaded tensors are page-locked. The host allocator rounds these to a power of two.
    assign: Assign  # sets the part of a tensor
    empty_cache: Callable[[], None]  # returns the free segments of the GPU's allocator

    @classmethod
    def of(cls, config: Config, gpu: torch.device, assign: Assign, empty_cache: Callable[[], None]) -> Buffers:
        """Return the buffers of a configuration."""
        offload = config.offload
        states = torch.device("cpu") if offload.enabled else gpu
        return cls(gpu, states, offload.enabled and offload.pin_memory, assign, empty_cache)

    def on_gpu(self, elements: int, dtype: torch.dtype, part: str) -> Tensor:
        """Return a tensor on the GPU."""
        return self._allocate(elements, dtype, part, self.gpu)

    def use_briefly(self, elements: int, dtype: torch.dtype, part: str = "temporaries") -> None:
        """Allocate a tensor on the GPU, and free it."""
        self.on_gpu(elements, dtype, part)

    def with_states(self, elements: int, dtype: torch.dtype, part: str, *, can_pin: bool = True) -> Tensor:
        """Return a tensor where the optimizer states are."""
        if self.pinned and can_pin:
            elements = round_to_power_of_two(elements * dtype.itemsize) // dtype.itemsize
        return self._allocate(elements, dtype, part, self.states)

    def pinned_on_host(self, elements: int, dtype: torch.dtype, part: str) -> Tensor:
        """Return a page-locked tensor on the host. DeepSpeed locks offloaded parameters also with offload=true."""
        elements = round_to_power_of_two(elements * dtype.itemsize) // dtype.itemsize
        return self._allocate(elements, dtype, part, torch.device("cpu"))

    def _allocate(self, elements: int, dtype: torch.dtype, part: str, device: torch.device) -> Tensor:
        tensor = torch.empty(elements, dtype=dtype, device=device)
        self.assign(part, [tensor])
        return tensor


def round_to_power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least ``size``; 0 for 0."""
    return 1 << (size - 1).bit_length() if size else 0


def read_zero(settings: dict[str, Any], key: str, default: Any) -> Any:
    """Return a value of the section ``zero_optimization``."""
    return settings["zero_optimization"].get(key, default)


class Partitions:
    """What ``zero.Init`` leaves of the parameters of each module: this rank's shares, and no whole parameter."""

    def __init__(self, config: Config) -> None:
        self.order: dict[nn.Parameter, int] = {}  # ``ds_id``: numbers in the order in which they were partitioned
        self.shares: dict[nn.Parameter, Tensor] = {}  # on the GPU; of trained ones until the optimizer is built
        self._on_gpu, self._world_size = not config.offload.enabled, config.cluster.world_size

    def add(self, params: Iterable[nn.Parameter]) -> None:
        """Divide the parameters of a module that are still whole."""
        for param in params:
            if param not in self.order:
                self.order[param] = len(self.order)
                if self._on_gpu:
                    size = share_of(param, self._world_size)
                    self.shares[param] = torch.empty(size, dtype=param.dtype, device=param.device)
                resize_storage(param, 0)


def share_of(param: nn.Parameter, world_size: int) -> int:
    """Return the elements of a parameter that each rank has; the last share is padded."""
    return -(-param.numel() // world_size)


def cut_into_sub_groups(sizes: Sequence[int], limit: int) -> list[int]:
    """Return the elements of the sub-groups of a group of shares (``_create_fp16_sub_groups``)."""
    found = [0]
    for size in sizes:
        if found[-1] >= limit:
            found.append(0)
        found[-1] += size
    return found


def resize_storage(param: nn.Parameter, elements: int) -> None:
    """Give a parameter memory for some elements; 0 frees it."""
    param.untyped_storage().resize_(elements * param.element_size())


@dataclass
class _Bucket:
    """The gradients that are reduced together (``IPGBucket``)."""

    params: list[nn.Parameter] = field(default_factory=list)
    elements: int = 0
    oversized: Tensor | None = None  # a gradient that is larger than the bucket, or its copy


class ZeroOneTwo(ShardedOptimizer):
    """Gradients and optimizer states of one rank at stage 1 or 2."""

    def __init__(
        self, module: nn.Module, config: Config, settings: dict[str, Any], buffers: Buffers, rank: int = 0
    ) -> None:
        """Trace a rank; 0 stands for the one that keeps most."""
        super().__init__(module, config, settings, buffers)
        self.accumulation = config.train.gradient_accumulation_steps
        self.stage: int = settings["zero_optimization"]["stage"]
        self.num_buckets = 2 if read_zero(settings, "overlap_comm", False) else 1
        self._partition(self.groups, config.cluster.world_size, rank)
        self.optimizer = make_optimizer(module, config)
        self.masters = [self._flatten(group, share) for group, share in zip(self.groups, self.shares, strict=True)]
        self.host_buffers: list[Tensor] = []
        if self.offloads:
            self._allocate_offload_buffers(MOMENTS[config.train.optimizer])
        else:
            zeros = [torch.zeros_like(master) for master in self.masters]  # gradients in fp32
            del zeros
            for group, master in zip(self.optimizer.param_groups, self.masters, strict=True):
                group["params"] = [master]
        self.bucket = _Bucket()
        self.bucket_memory: list[Tensor] = []
        self.held: list[Tensor] = []  # oversized gradients of other ranks, which stage 1 keeps until the end
        self.new_gradients: Tensor | None = None  # grads_in_partition
        self.gradients: Tensor | None = None  # all_grad_tensors, averaged_gradients

    def _partition(self, groups: list[list[nn.Parameter]], world_size: int, rank: int) -> None:
        """Compute the shares of a rank, and which other one may have a higher peak."""
        sizes = [[param.numel() for param in group] for group in groups]
        fullest, earliest = fullest_rank(sizes, world_size), fullest_rank(sizes, world_size, earliest=True)
        keeps_early = not self.offloads and (self.stage == 2 or self.num_buckets == 2)
        self.other_ranks = (earliest,) if keeps_early and earliest not in (fullest, rank) else ()
        rank = rank or fullest
        shares = [partition_group(group_sizes, world_size, rank) for group_sizes in sizes]
        self.shares = [share.size for share in shares]
        self.rank = rank
        self.owned: dict[nn.Parameter, int] = {}
        self.slices: dict[nn.Parameter, list[Slice]] = {}
        for group, numbers, share in zip(groups, sizes, shares, strict=True):
            offsets = [0, *accumulate(numbers)]
            for param, owned, offset in zip(group, share.owned, offsets, strict=False):
                self.owned[param] = owned
                self.slices[param] = cut_into_slices(offset, param.numel(), share.size)

    @torch.no_grad()
    def _flatten(self, group: list[nn.Parameter], share: int) -> nn.Parameter:
        """Let the parameters of a group be views of one tensor, and return the fp32 copy of this rank's share of it."""
        buffers = self.buffers
        buffers.empty_cache()
        missing = share * self.world_size - sum(param.numel() for param in group)
        padding = [torch.zeros(missing, dtype=self.dtype, device=group[0].device)] if missing else []
        pieces = [tensor.detach().flatten() for tensor in (*group, *padding)]
        flat = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        buffers.assign("parameters", [flat])
        offset = 0
        for param in group:
            param.data = flat.narrow(0, offset, param.numel()).view(param.shape)
            offset += param.numel()
        copied = flat.narrow(0, self.rank * share, share).clone()
        if not self.offloads and self.dtype == torch.float32:
            buffers.assign("optimizer_states", [copied])
            return nn.Parameter(copied)
        return nn.Parameter(buffers.with_states(share, torch.float32, "optimizer_states"))

    def _allocate_offload_buffers(self, moments: int) -> None:
        largest = max(param.numel() for param in self.params)
        self.gpu_buffer = self.buffers.on_gpu(largest, self.dtype, "gradients")  # temp_grad_buffer_for_gpu_offload
        on_host = self.host_buffers
        for share in self.shares:
            for _ in range(moments):
                on_host.append(self.buffers.with_states(share, torch.float32, "optimizer_states", can_pin=False))
            on_host.append(self.buffers.with_states(share, torch.float32, "gradients"))
            on_host.append(self.buffers.with_states(share, self.dtype, "parameters"))  # param_buffer_of_bit16
        if self.buffers.pinned:  # temp_grad_buffer_for_cpu_offload; nothing writes to it, so only locked pages exist
            on_host.append(self.buffers.with_states(largest, self.dtype, "gradients"))
        if self.stage == 2 and self.accumulation > 1:  # accumulated_grads_in_cpu
            owned = [param for param in self.params if self.owned[param]]
            on_host += [self.buffers.with_states(param.numel(), self.dtype, "gradients") for param in owned]

    @torch.no_grad()
    def _on_gradient(self, param: Tensor) -> None:
        """Take a gradient, as ``process_gradients`` does."""
        assert isinstance(param, nn.Parameter)
        if not self.bucket_memory:
            self.bucket_memory = [
                self.buffers.on_gpu(self.bucket_size, self.dtype, "communication") for _ in range(self.num_buckets)
            ]
        if self.stage == 2 or self.num_buckets == 2:
            self._add_to_bucket(param)

    def _add_to_bucket(self, param: nn.Parameter) -> None:
        if self.stage == 1 and not self.is_last:
            return
        if self.bucket.elements + param.numel() > self.bucket_size:
            self._reduce()
        if param.numel() > self.bucket_size:
            assert param.grad is not None
            self.bucket.oversized = param.grad.clone() if self.offloads else param.grad
        self.bucket.params.append(param)
        self.bucket.elements += param.numel()
        param.grad = None  # It is in the bucket now.

    def _reduce(self) -> None:
        """Reduce the bucket and keep what this rank owns (``reduce_ipg_grads``)."""
        bucket, self.bucket = self.bucket, _Bucket()
        if not bucket.params:
            return
        for slices in reduced_at_once([self.slices[param] for param in bucket.params], self.bucket_size):
            if len(slices) > 1:  # They are flattened into a copy.
                self.buffers.use_briefly(sum(part.size for part in slices), self.dtype, "communication")
        for param in bucket.params:
            if self.owned[param]:
                self._keep(param)
            elif self.stage == 1 and bucket.oversized is not None:
                self.held.append(bucket.oversized)

    def _keep(self, param: nn.Parameter) -> None:
        """Keep the gradient of a parameter of this rank (``copy_grads_in_partition``)."""
        if not self.offloads:
            if self.new_gradients is None:
                total = sum(owned.numel() for owned in self.params if self.owned[owned])
                self.new_gradients = self.buffers.on_gpu(total, self.dtype, "gradients")
        elif self.is_last:
            self.buffers.use_briefly(self.owned[param], torch.float64)  # the norm
            if self.dtype != torch.float32:
                self.buffers.use_briefly(self.owned[param], torch.float32)

    @torch.no_grad()
    def after_backward(self) -> None:
        """Finish a micro-batch (``independent_gradient_partition_epilogue``)."""
        if self.stage == 1 and not self.is_last:
            return
        if self.stage == 1:
            for param in self.params:
                if param.grad is not None:
                    self._add_to_bucket(param)
        self._reduce()
        if self.gradients is None:
            self.gradients = self.new_gradients
        self.new_gradients = None
        self.bucket_memory, self.held = [], []
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights, one parameter group after the other."""
        if self.offloads:
            return
        for param in self.params:
            if self.owned[param]:  # get_grad_norm_direct
                self.buffers.use_briefly(self.owned[param], torch.float64)
        groups = self.optimizer.param_groups
        for number, (group, master) in enumerate(zip(self.groups, self.masters, strict=True)):
            master.grad = self._flat_gradient(group, master)
            if number == len(groups) - 1:
                self.gradients = None
            self.optimizer.param_groups = [groups[number]]
            self.optimizer.step()
            self.buffers.assign("optimizer_states", tensors_in(self.optimizer.state[master]))
            master.grad = None
        self.optimizer.param_groups = groups

    def _flat_gradient(self, group: list[nn.Parameter], master: nn.Parameter) -> Tensor:
        """Return the gradients of a share, flattened and then in fp32. A single one is not copied to flatten it."""
        owned = [self.owned[param] for param in group if self.owned[param]]
        if len(owned) > 1 or sum(owned) < master.numel():
            flat = self.buffers.on_gpu(master.numel(), self.dtype, "gradients")
        else:
            assert self.gradients is not None
            flat = self.gradients.narrow(0, 0, master.numel())
        gradient = flat.float()
        self.buffers.assign("gradients", [gradient])
        return gradient


ALIGNMENT = 2  # elements to which stages 1 and 2 align a partition (``nccl_start_alignment_factor``)


@dataclass(frozen=True)
class Partition:
    """The share of one rank of one parameter group, for stages 1 and 2."""

    size: int  # elements of the share, with padding; equal on all ranks
    owned: tuple[int, ...]  # for each parameter of the group, how many of its elements are in this share


def partition_group(sizes: Sequence[int], world_size: int, rank: int) -> Partition:
    """Return the share of a rank of a group of parameters, which are flattened one after the other."""
    aligned = -(-sum(sizes) // (ALIGNMENT * world_size)) * ALIGNMENT * world_size
    share = aligned // world_size
    first, last = rank * share, (rank + 1) * share
    owned, offset = [], 0
    for size in sizes:
        owned.append(max(0, min(offset + size, last) - max(offset, first)))
        offset += size
    return Partition(share, tuple(owned))


def fullest_rank(groups: Sequence[Sequence[int]], world_size: int, *, earliest: bool = False) -> int:
    """Return the rank that keeps most: the whole gradients of all parameters that its shares overlap.

    ``earliest`` chooses among the ranks that own a part of the last parameter, in the largest group. The backward pass
    computes its gradient first, while all activations exist. Then such a rank allocates memory for all its gradients.
    """
    shares = [[partition_group(sizes, world_size, rank).owned for sizes in groups] for rank in range(world_size)]

    def kept(rank: int) -> int:
        owned = (zip(sizes, share, strict=True) for sizes, share in zip(groups, shares[rank], strict=True))
        return sum(size for group in owned for size, elements in group if elements)

    largest = max(range(len(groups)), key=lambda number: sum(groups[number]))
    return max((rank for rank in range(world_size) if not earliest or shares[rank][largest][-1]), key=kept)


@dataclass(frozen=True)
class Slice:
    """Elements of a gradient that one rank keeps."""

    rank: int
    size: int


def cut_into_slices(offset: int, size: int, share: int) -> list[Slice]:
    """Return the slices of a parameter that starts at ``offset`` of its group."""
    ends = [*range((offset // share + 1) * share, offset + size, share), offset + size]
    starts = [offset, *ends[:-1]]
    return [Slice(start // share, end - start) for start, end in zip(starts, ends, strict=True)]


def reduced_at_once(gradients: Sequence[Sequence[Slice]], bucket_size: int) -> list[list[Slice]]:
    """Return the slices that are reduced together, up to more than a bucket. Neighbors of one rank are one slice."""
    slices = [part for gradient in gradients for part in gradient]
    merged = [Slice(rank, sum(part.size for part in found)) for rank, found in groupby(slices, lambda part: part.rank)]
    reductions: list[list[Slice]] = [[]]
    for merged_slice in merged:
        reductions[-1].append(merged_slice)
        if sum(part.size for part in reductions[-1]) > bucket_size:
            reductions.append([])
    return [slices for slices in reductions if slices]

"""The memory of ZeRO's stages 1 and 2: a model of what DeepSpeed allocates, on fake tensors.

The module runs in 16 bits, forward and backward, as in a run. Hooks take each gradient when autograd has accumulated
it, as DeepSpeed's hooks do, and allocate what DeepSpeed 0.19.8 allocates for it. Names in comments are those of
``DeepSpeedZeroOptimizer`` in ``deepspeed/runtime/zero/stage_1_and_2.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from distexp.config import Config
from distexp.plan.predicted_memory import MOMENTS
from distexp.plan.zero_base import ShardedOptimizer
from distexp.plan.zero_buffers import Buffers, read_zero
from distexp.plan.zero_partition import fullest_rank, owners, partition_group


@dataclass
class _Bucket:
    """The gradients that are reduced together (``IPGBucket``)."""

    params: list[nn.Parameter] = field(default_factory=list)
    elements: int = 0
    oversized: Tensor | None = None  # the copy of a gradient that is larger than the bucket


class ZeroOneTwo(ShardedOptimizer):
    """Gradients and optimizer states of one rank at stage 1 or 2."""

    def __init__(self, module: nn.Module, config: Config, settings: dict[str, Any], buffers: Buffers) -> None:
        super().__init__(module, config, settings, buffers)
        self.accumulation = config.train.gradient_accumulation_steps
        self.stage: int = settings["zero_optimization"]["stage"]
        self.num_buckets = 2 if read_zero(settings, "overlap_comm", False) else 1
        self._partition(self.groups, config.cluster.world_size)
        self.masters = [buffers.with_states(size, torch.float32, "optimizer_states") for size in self.shares]
        moments = MOMENTS[config.train.optimizer]
        self.moments = [
            buffers.with_states(size, torch.float32, "optimizer_states", can_pin=False)
            for size in self.shares
            for _ in range(moments)
        ]
        self.host_buffers: list[Tensor] = []
        if self.offloads:
            self._allocate_offload_buffers()
        self.bucket = _Bucket()
        self.bucket_memory: list[Tensor] = []
        self.new_gradients: Tensor | None = None  # grads_in_partition
        self.gradients: Tensor | None = None  # all_grad_tensors, averaged_gradients

    def _partition(self, groups: list[list[nn.Parameter]], world_size: int) -> None:
        """Compute the shares of the rank that keeps most."""
        sizes = [[param.numel() for param in group] for group in groups]
        rank = fullest_rank(sizes, world_size)
        shares = [partition_group(each, world_size, rank) for each in sizes]
        self.shares = [share.size for share in shares]
        self.owned: dict[nn.Parameter, int] = {}
        self.owners: dict[nn.Parameter, range] = {}
        for group, numbers, share in zip(groups, sizes, shares, strict=True):
            offsets = [0, *accumulate(numbers)]
            for param, owned, offset in zip(group, share.owned, offsets, strict=False):
                self.owned[param] = owned
                self.owners[param] = owners(offset, param.numel(), share.size)

    def _allocate_offload_buffers(self) -> None:
        largest = max(param.numel() for param in self.params)
        self.gpu_buffer = self.buffers.on_gpu(largest, self.dtype, "gradients")  # temp_grad_buffer_for_gpu_offload
        on_host = self.host_buffers
        for share in self.shares:
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
        if len({rank for param in bucket.params for rank in self.owners[param]}) > 1:
            # Slices of several ranks are flattened into a copy.
            flat = self.buffers.on_gpu(bucket.elements, self.dtype, "communication")
            del flat
        for param in bucket.params:
            if self.owned[param]:
                self._keep(param)

    def _keep(self, param: nn.Parameter) -> None:
        """Keep the gradient of a parameter of this rank (``copy_grads_in_partition``)."""
        if not self.offloads:
            if self.new_gradients is None:
                total = sum(each.numel() for each in self.params if self.owned[each])
                self.new_gradients = self.buffers.on_gpu(total, self.dtype, "gradients")
        elif self.is_last:
            norm = self.buffers.on_gpu(self.owned[param], torch.float64, "temporaries")
            del norm
            if self.dtype != torch.float32:
                full = self.buffers.on_gpu(self.owned[param], torch.float32, "temporaries")
                del full

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
        self.bucket_memory = []
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights, one parameter group after the other."""
        if self.offloads:
            return
        norm = self.buffers.on_gpu(max(self.owned.values()), torch.float64, "temporaries")
        del norm
        for share in self.shares:
            flat = self.buffers.on_gpu(share, self.dtype, "temporaries")
            gradient = flat if self.dtype == torch.float32 else self.buffers.on_gpu(share, torch.float32, "gradients")
            del flat
            if share == self.shares[-1]:
                self.gradients = None
            del gradient

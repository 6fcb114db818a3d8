"""The memory of ZeRO's stage 3: a model of what DeepSpeed allocates, on fake tensors.

Names in comments are those of DeepSpeed 0.19.8, ``deepspeed/runtime/zero/stage3.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from distexp.config import Config
from distexp.plan.cuda_optimizer import make_optimizer
from distexp.plan.recorder import tensors_in
from distexp.plan.zero3_fetcher import Fetcher, Receiver
from distexp.plan.zero3_partitions import Partitions, cut_into_sub_groups, share_of
from distexp.plan.zero_base import ShardedOptimizer
from distexp.plan.zero_buffers import Buffers, read_zero
from distexp.runs.model_states import MOMENTS

NORM_CHUNK = 250_000_000
"""Elements of a gradient that one norm reads, if the optimizer is offloaded (``_constant_buffered_norm2``)."""


class ZeroThree(ShardedOptimizer):
    """Parameters, gradients and optimizer states of one rank at stage 3."""

    def __init__(
        self, module: nn.Module, config: Config, settings: dict[str, Any], buffers: Buffers, partitions: Partitions
    ) -> None:
        super().__init__(module, config, settings, buffers)
        self.micro_batch = 0
        threshold = int(read_zero(settings, "stage3_param_persistence_threshold", 100_000))
        persistent = {param: None for param in module.parameters() if param.numel() <= threshold}
        limit = int(read_zero(settings, "sub_group_size", 1_000_000_000))
        divided = [cut_into_sub_groups([self._share(param) for param in group], limit) for group in self.groups]
        self.sub_groups = [(number, share) for number, shares in enumerate(divided) for share in shares]
        overlaps = read_zero(settings, "overlap_comm", True)  # It is true by default at stage 3.
        gather_stream, self.reduce_stream = (_stream(is_new=overlaps) for _ in range(2))
        self.optimizer = make_optimizer(module, config)
        self.flat = self._defragment(partitions.shares)
        self.frozen = partitions.shares
        self._allocate_states(MOMENTS[config.train.optimizer])
        receiver = Receiver(buffers, self.dtype, self.world_size, self.offloads, gather_stream)
        self.fetcher = Fetcher(receiver, persistent, partitions.order, settings)
        self.fetcher.hook(module)
        self.bucket: list[nn.Parameter] = []
        self.oversized: dict[nn.Parameter, Tensor] = {}

    def _share(self, param: nn.Parameter) -> int:
        return share_of(param, self.world_size)

    @torch.no_grad()
    def _defragment(self, shares: dict[nn.Parameter, Tensor]) -> Tensor | None:
        """Replace the shares of the trained parameters by one tensor; None if they are on the host."""
        if self.offloads:
            return None
        for param in self.params:
            del shares[param]
        self.buffers.assign("parameters", shares.values())
        self.buffers.empty_cache()
        flat = self.buffers.on_gpu(sum(size for _, size in self.sub_groups), self.dtype, "parameters")
        if self.world_size == 1:  # A parameter is its share.
            offset = 0
            for param in self.params:
                param.data = flat.narrow(0, offset, param.numel()).view(param.shape)
                offset += param.numel()
            for param, share in shares.items():
                param.data = share.view(param.shape)
        return flat

    @torch.no_grad()
    def _allocate_states(self, moments: int) -> None:
        buffers, sizes = self.buffers, [size for _, size in self.sub_groups]
        self.states = self._allocate_on_host(moments) if self.offloads else []
        self.masters = [] if self.flat is None else self._masters(self.flat)
        if not self.offloads:
            largest = buffers.on_gpu(max(sizes), torch.float32, "gradients")  # initialize_optimizer_states
            del largest
        self.bucket_memory = buffers.on_gpu(self.bucket_size, self.dtype, "communication")
        self.gradients = buffers.with_states(sum(sizes), self.dtype, "gradients")  # grad_partitions_flat_buffer
        for group in self.optimizer.param_groups:
            group["params"] = []

    def _allocate_on_host(self, moments: int) -> list[Tensor]:
        states, allocate = [], self.buffers.with_states
        for _, size in self.sub_groups:
            states += [allocate(size, torch.float32, "optimizer_states", can_pin=False) for _ in range(1 + moments)]
            states.append(allocate(size, torch.float32, "gradients"))
            states.append(self.buffers.pinned_on_host(size, self.dtype, "parameters"))
        return states

    def _masters(self, flat: Tensor) -> list[nn.Parameter]:
        """Return the shares in fp32. They are converted, and the result is cloned (``_create_fp32_partitions``)."""
        masters, offset = [], 0
        for _, size in self.sub_groups:
            share = flat.narrow(0, offset, size)
            offset += size
            if self.dtype != torch.float32:
                converted = share.float()  # The one before is freed after this.
                share = converted.clone()
                self.buffers.assign("optimizer_states", [share])
            masters.append(nn.Parameter(share))
        return masters

    @torch.no_grad()
    def _on_gradient(self, param: Tensor) -> None:
        """Take a gradient (``reduce_independent_p_g_buckets_and_remove_grads``)."""
        assert isinstance(param, nn.Parameter)
        assert param.grad is not None
        elements = sum(gradient.numel() for gradient in self.bucket)
        if self.bucket and elements + param.numel() > self.bucket_size:
            self._reduce()
            elements = 0
        if elements + param.numel() > self.bucket_size:
            self.oversized[param] = param.grad
        self.bucket.append(param)
        param.grad = None

    def _reduce(self) -> None:
        """Reduce the bucket and add it to the share of this rank (``__reduce_and_partition_ipg_grads``)."""
        with torch.cpu.stream(self.reduce_stream):
            self._reduce_bucket()
        self.bucket, self.oversized = [], {}

    def _reduce_bucket(self) -> None:
        buffers = self.buffers
        interleaved = None
        if len(self.bucket) > 1 or self.bucket[0].numel() % self.world_size:
            elements = sum(self._share(param) * self.world_size for param in self.bucket)
            interleaved = buffers.on_gpu(elements, self.dtype, "communication")
        if self.offloads:
            for param in self.bucket:
                part = buffers.on_gpu(self._share(param), self.dtype, "temporaries")
                if self.is_last:
                    norm = buffers.on_gpu(min(self._share(param), NORM_CHUNK), torch.float64, "temporaries")
                    del norm
                    full = buffers.on_gpu(self._share(param), torch.float32, "temporaries")
                    del full
                del part
        del interleaved

    @torch.no_grad()
    def after_backward(self) -> None:
        """Finish a micro-batch (``independent_gradient_partition_epilogue``)."""
        if self.bucket:
            self._reduce()
        self.micro_batch += 1

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights, one sub-group after the other."""
        self.micro_batch = 0
        self.fetcher.release_all()
        if self.dtype == torch.float16:
            self._check_overflow()
        if not self.offloads:
            self._update()
        self.fetcher.gather_persistent()

    def _update(self) -> None:
        for param in self.params:  # get_grad_norm_direct
            wide = self.buffers.on_gpu(self._share(param), torch.float64, "temporaries")
            del wide
        for (number, size), master in zip(self.sub_groups, self.masters, strict=True):
            flat = self.buffers.on_gpu(size, self.dtype, "gradients")
            master.grad = flat.float()
            del flat
            self.buffers.assign("gradients", [master.grad])
            self.optimizer.param_groups[number]["params"] = [master]
            self.optimizer.step()
            self.optimizer.param_groups[number]["params"] = []
            self.buffers.assign("optimizer_states", tensors_in(self.optimizer.state[master]))
            master.grad = None

    def _check_overflow(self) -> None:
        """Look for infinite gradients where they are: ``isinf`` copies them, and makes a bool for each."""
        with torch.cpu.stream(self.reduce_stream):
            copied = self.buffers.with_states(self.gradients.numel(), self.dtype, "temporaries", can_pin=False)
            infinite = self.buffers.with_states(self.gradients.numel(), torch.bool, "temporaries", can_pin=False)
            del copied, infinite


def _stream(*, is_new: bool) -> Any:
    return torch.cpu.Stream() if is_new else torch.cpu.current_stream()

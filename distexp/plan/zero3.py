"""The memory of ZeRO's stage 3: a model of what DeepSpeed allocates, on fake tensors.

Hooks gather the parameters of a module before its forward and backward pass, and free them afterwards. Names in
comments are those of DeepSpeed 0.19.8, ``deepspeed/runtime/zero/stage3.py`` and ``partitioned_param_coordinator.py``.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distexp.config import Config
from distexp.plan.predicted_memory import MOMENTS
from distexp.plan.zero_base import ShardedOptimizer
from distexp.plan.zero_buffers import Buffers, read_zero

NORM_CHUNK = 250_000_000
"""Elements of a gradient that one norm reads, if the optimizer is offloaded (``_constant_buffered_norm2``)."""


@dataclass
class _Gather:
    """Parameters that are on the way, and the buffer that they arrive in."""

    params: list[nn.Parameter]
    flat: Tensor | None


class ZeroThree(ShardedOptimizer):
    """Parameters, gradients and optimizer states of one rank at stage 3."""

    def __init__(self, module: nn.Module, config: Config, settings: dict[str, Any], buffers: Buffers) -> None:
        super().__init__(module, config, settings, buffers)
        self.world_size, self.micro_batch = config.cluster.world_size, 0
        threshold = int(read_zero(settings, "stage3_param_persistence_threshold", 100_000))
        self.persistent = {param for param in self.params if param.numel() <= threshold}
        self.shares = [sum(self._share(param) for param in group) for group in self.groups]
        self._allocate_states(MOMENTS[config.train.optimizer])
        self.fetcher = _Fetcher(self, settings)
        self.fetcher.hook(module)
        self.bucket_memory = buffers.on_gpu(self.bucket_size, self.dtype, "communication")
        self.bucket: list[nn.Parameter] = []
        # reduce_and_partition_stream; at stage 3 overlap_comm is true by default.
        overlaps = read_zero(settings, "overlap_comm", True)
        self.reduce_stream = torch.cpu.Stream() if overlaps else torch.cpu.current_stream()
        self.oversized: dict[nn.Parameter, Tensor] = {}

    def _share(self, param: nn.Parameter) -> int:
        return -(-param.numel() // self.world_size)

    def _allocate_states(self, moments: int) -> None:
        allocate, total = self.buffers.with_states, sum(self.shares)
        self.states = [allocate(total, self.dtype, "gradients")]  # grad_partitions_flat_buffer
        for share in self.shares:
            if self.dtype != torch.float32 or self.offloads:
                self.states.append(allocate(share, torch.float32, "optimizer_states", can_pin=False))
            self.states += [allocate(share, torch.float32, "optimizer_states", can_pin=False) for _ in range(moments)]
            if self.offloads:
                self.states.append(allocate(share, torch.float32, "gradients"))
                self.states.append(self.buffers.pinned_on_host(share, self.dtype, "parameters"))
            elif self.world_size > 1:
                self.states.append(allocate(share, self.dtype, "parameters"))

    @torch.no_grad()
    def _on_gradient(self, param: Tensor) -> None:
        """Take a gradient (``reduce_independent_p_g_buckets_and_remove_grads``)."""
        assert isinstance(param, nn.Parameter)
        assert param.grad is not None
        elements = sum(each.numel() for each in self.bucket)
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
                part = buffers.on_gpu(self._share(param), self.dtype, "temporaries") if self.micro_batch else None
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
        self.fetcher.finish()

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights, one parameter group after the other."""
        self.micro_batch = 0
        self.fetcher.release_all()
        self._check_overflow()
        if self.offloads:
            return
        norm = self.buffers.on_gpu(max(self._share(param) for param in self.params), torch.float64, "temporaries")
        del norm
        for share in self.shares:
            flat = self.buffers.on_gpu(share, self.dtype, "temporaries")
            gradient = flat if self.dtype == torch.float32 else self.buffers.on_gpu(share, torch.float32, "gradients")
            del flat
            del gradient

    def _check_overflow(self) -> None:
        """Look for infinite gradients where they are: ``isinf`` copies them, and makes a bool for each."""
        copied = self.buffers.with_states(sum(self.shares), self.dtype, "temporaries", can_pin=False)
        infinite = self.buffers.with_states(sum(self.shares), torch.bool, "temporaries", can_pin=False)
        del copied, infinite


class _Fetcher:
    """Gathers parameters ahead of their use, in the order of the previous micro-batch."""

    def __init__(self, zero: ZeroThree, settings: dict[str, Any]) -> None:
        self.zero, self.persistent = zero, zero.persistent
        self.gathers = zero.world_size > 1 or zero.offloads
        self.prefetch_size = int(read_zero(settings, "stage3_prefetch_bucket_size", 50_000_000))
        self.max_live = int(read_zero(settings, "stage3_max_live_parameters", 1_000_000_000))
        self.max_distance = int(read_zero(settings, "stage3_max_reuse_distance", 1_000_000_000))
        self.available = set(zero.params)
        self.in_flight: dict[nn.Parameter, _Gather] = {}
        self.active: dict[nn.Parameter, set[nn.Module]] = defaultdict(set)
        self.order: Sequence[nn.Module] = []  # of the modules in the previous micro-batch
        self.recorded: list[nn.Module] = []
        self.queue: deque[tuple[nn.Parameter, int]] = deque()
        self.next_use: dict[nn.Parameter, int] = {}  # __most_recent_step_id_param_fetched_for
        self.position = self.live = 0

    def hook(self, module: nn.Module) -> None:
        """Fetch and release around each module that has parameters itself."""
        if not self.gathers:
            return
        for each in module.modules():
            if any(True for _ in each.parameters(recurse=False)):
                each.register_forward_pre_hook(lambda module, _: self._fetch(module))
                each.register_forward_hook(lambda module, *_: self._release(module))
                each.register_full_backward_pre_hook(lambda module, _: self._fetch(module))
                each.register_full_backward_hook(lambda module, *_: self._release(module))
        for param in self.zero.params:
            self._free(param)
        self.live = 0

    @torch.no_grad()
    def _fetch(self, module: nn.Module) -> None:
        params = list(module.parameters(recurse=False))
        self._gather(param for param in params if param not in self.available and param not in self.in_flight)
        for param in params:
            self.active[param].add(module)
            if param in self.in_flight:
                self._wait(self.in_flight[param])
        self.recorded.append(module)
        if self.order:
            self._forget_queued(params)
            self._prefetch()
        self.position += 1

    def _forget_queued(self, params: Iterable[nn.Parameter]) -> None:
        """Remove the parameters of this module from the queue."""
        missing = {param for param in params if self.next_use.get(param, -1) < self.position}
        seen: set[nn.Parameter] = set()
        while self.queue and len(seen) < len(missing):
            param, use = self.queue.popleft()
            self.next_use[param] = use
            seen.add(param)

    def _prefetch(self) -> None:
        limit, elements = min(self.max_live - self.live, self.prefetch_size), 0
        chosen: dict[nn.Parameter, None] = {}  # a list would compare the values of tensors
        while self.queue and elements < limit:
            param, use = self.queue.popleft()
            self.next_use[param] = max(self.next_use.get(param, -1), use)
            if param not in self.available and param not in self.in_flight and param not in chosen:
                chosen[param] = None
                elements += param.numel()
        self._gather(chosen)

    def _gather(self, needed: Iterable[nn.Parameter]) -> None:
        """Start to gather parameters (``all_gather_coalesced``)."""
        params = list(needed)
        if not params:
            return
        self.live += sum(param.numel() for param in params)
        zero, flat = self.zero, None
        if zero.world_size > 1:
            if len(params) > 1:
                elements = sum(zero._share(param) for param in params) * zero.world_size
                flat = zero.buffers.on_gpu(elements, zero.dtype, "communication")
            elif zero.offloads:
                part = zero.buffers.on_gpu(zero._share(params[0]), zero.dtype, "communication")
                del part
        gather = _Gather(params, flat)
        self.in_flight.update((param, gather) for param in params)
        if flat is None:
            for param in params:
                _resize(param, param.numel())

    def _wait(self, gather: _Gather) -> None:
        for param in gather.params:
            if gather.flat is not None:
                _resize(param, param.numel())
            self.available.add(param)
            del self.in_flight[param]
        gather.flat = None

    @torch.no_grad()
    def _release(self, module: nn.Module) -> None:
        kept = self._needed_soon() if self.order else set()
        for param in module.parameters(recurse=False):
            self.active[param].discard(module)
            if param in self.persistent or param in kept or self.active[param]:
                continue
            if self.order and self.next_use.get(param, -1) > self.position:
                continue
            if param in self.available:
                self._free(param)

    def _needed_soon(self) -> set[nn.Parameter]:
        """Return the parameters of the next modules (``__params_to_release``)."""
        found: set[nn.Parameter] = set()
        passed = 0
        for module in self.order[self.position :]:
            if passed >= self.max_distance:
                break
            for param in module.parameters(recurse=False):
                found.add(param)
                passed += param.numel()
        return found

    def _free(self, param: nn.Parameter) -> None:
        if param not in self.persistent:
            _resize(param, 0)
            self.available.discard(param)
            self.live -= param.numel()

    def finish(self) -> None:
        """End a micro-batch: the order of its modules is that of the next one (``reset_step``)."""
        if not self.gathers:
            return
        for gather in list(self.in_flight.values()):
            if gather.params[0] in self.in_flight:
                self._wait(gather)
        self.order, self.recorded = tuple(self.recorded), []
        self.queue = deque(
            (param, index) for index, each in enumerate(self.order) for param in each.parameters(recurse=False)
        )
        self.next_use, self.position, self.live = {}, 0, 0

    def release_all(self) -> None:
        """Free all gathered parameters, before the optimizer step (``_partition_all_parameters``)."""
        if self.gathers:
            for param in list(self.available):
                self.active[param].clear()
                self._free(param)
            self.live = 0


def _resize(param: nn.Parameter, elements: int) -> None:
    param.untyped_storage().resize_(elements * param.element_size())

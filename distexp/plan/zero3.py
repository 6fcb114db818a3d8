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
from distexp.plan.cuda_optimizer import make_optimizer
from distexp.plan.predicted_memory import MOMENTS
from distexp.plan.recorder import tensors_in
from distexp.plan.zero_base import ShardedOptimizer
from distexp.plan.zero_buffers import Buffers, read_zero

NORM_CHUNK = 250_000_000
"""Elements of a gradient that one norm reads, if the optimizer is offloaded (``_constant_buffered_norm2``)."""


class Partitions:
    """What ``zero.Init`` leaves of the parameters of each module: this rank's shares, and no whole parameter.

    Attributes:
        order: numbers of the parameters in the order in which they were partitioned (``ds_id``).
        shares: the shares on the GPU. Those of trained parameters exist until the optimizer is built.
    """

    def __init__(self, config: Config) -> None:
        self.order: dict[nn.Parameter, int] = {}
        self.shares: dict[nn.Parameter, Tensor] = {}
        self._on_gpu, self._world_size = not config.offload.enabled, config.cluster.world_size

    def add(self, params: Iterable[nn.Parameter]) -> None:
        """Divide the parameters of a module that are still whole."""
        for param in params:
            if param not in self.order:
                self.order[param] = len(self.order)
                if self._on_gpu:
                    share = -(-param.numel() // self._world_size)
                    self.shares[param] = torch.empty(share, dtype=param.dtype, device=param.device)
                _resize(param, 0)


@dataclass
class _Gather:
    """Parameters that are on the way, and the buffer that they arrive in. It exists until all of them were used."""

    params: list[nn.Parameter]
    flat: Tensor | None
    is_complete: bool = False


class ZeroThree(ShardedOptimizer):
    """Parameters, gradients and optimizer states of one rank at stage 3."""

    def __init__(
        self, module: nn.Module, config: Config, settings: dict[str, Any], buffers: Buffers, partitions: Partitions
    ) -> None:
        super().__init__(module, config, settings, buffers)
        self.micro_batch = 0
        threshold = int(read_zero(settings, "stage3_param_persistence_threshold", 100_000))
        self.persistent = [param for param in module.parameters() if param.numel() <= threshold]
        self.order = partitions.order
        limit = int(read_zero(settings, "sub_group_size", 1_000_000_000))
        divided = [cut_into_sub_groups([self._share(param) for param in group], limit) for group in self.groups]
        self.sub_groups = [(number, share) for number, shares in enumerate(divided) for share in shares]
        overlaps = read_zero(settings, "overlap_comm", True)  # It is true by default at stage 3.
        self.gather_stream, self.reduce_stream = (_stream(is_new=overlaps) for _ in range(2))
        self.optimizer = make_optimizer(module, config)
        self.flat = self._defragment(partitions.shares)
        self.frozen = partitions.shares
        self._allocate_states(MOMENTS[config.train.optimizer])
        self.fetcher = _Fetcher(self, settings)
        self.fetcher.hook(module)
        self.bucket: list[nn.Parameter] = []
        self.oversized: dict[nn.Parameter, Tensor] = {}

    def _share(self, param: nn.Parameter) -> int:
        return -(-param.numel() // self.world_size)

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


class _Fetcher:
    """Gathers parameters ahead of their use, in the order of the first micro-batch."""

    def __init__(self, zero: ZeroThree, settings: dict[str, Any]) -> None:
        self.zero, self.persistent = zero, set(zero.persistent)
        self.gathers = zero.world_size > 1 or zero.offloads
        self.prefetch_size = int(read_zero(settings, "stage3_prefetch_bucket_size", 50_000_000))
        self.max_live = int(read_zero(settings, "stage3_max_live_parameters", 1_000_000_000))
        self.max_distance = int(read_zero(settings, "stage3_max_reuse_distance", 1_000_000_000))
        self.available: set[nn.Parameter] = set()
        self.registry: dict[nn.Parameter, _Gather] = {}  # __inflight_param_registry
        self.active: dict[nn.Parameter, set[nn.Module]] = defaultdict(set)
        self.order: Sequence[nn.Module] = []  # of the modules in the first micro-batch
        self.recorded: list[nn.Module] = []
        self.queue: deque[tuple[nn.Parameter, int]] = deque()
        self.next_use: dict[nn.Parameter, int] = {}  # __most_recent_step_id_param_fetched_for
        self.position = self.live = 0

    def hook(self, module: nn.Module) -> None:
        """Fetch and release around each module that has parameters itself."""
        if not self.gathers:
            return
        module.register_forward_pre_hook(lambda *_: self._reset())
        for submodule in module.modules():
            if any(True for _ in submodule.parameters(recurse=False)):
                submodule.register_forward_pre_hook(lambda module, _: self._fetch(module))
                submodule.register_forward_hook(lambda module, *_: self._release(module))
                submodule.register_full_backward_pre_hook(lambda module, _: self._fetch(module))
                submodule.register_full_backward_hook(lambda module, *_: self._release(module))

    @torch.no_grad()
    def _fetch(self, module: nn.Module) -> None:
        params = list(module.parameters(recurse=False))
        self._gather(param for param in params if self._is_away(param))
        for param in params:
            self.active[param].add(module)
            if param in self.registry:
                self._wait(self.registry.pop(param))
        self.recorded.append(module)
        if self.order:
            self._forget_queued(params)
            self._prefetch()
        self.position += 1

    def _is_away(self, param: nn.Parameter) -> bool:
        """Return whether a parameter is neither here nor on the way."""
        return param not in self.available and param not in self.registry

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
            if self._is_away(param) and param not in chosen:
                chosen[param] = None
                elements += param.numel()
        self._gather(chosen)

    def _gather(self, needed: Iterable[nn.Parameter]) -> None:
        """Start to gather parameters (``all_gather_coalesced``)."""
        params = sorted(needed, key=self.zero.order.__getitem__)
        if not params:
            return
        self.live += sum(param.numel() for param in params)
        with torch.cpu.stream(self.zero.gather_stream):
            gather = _Gather(params, self._receive(params))
        self.registry.update((param, gather) for param in params)

    def _receive(self, params: list[nn.Parameter]) -> Tensor | None:
        """Allocate what parameters arrive in: a buffer for several, or the parameter itself."""
        zero, flat = self.zero, None
        if zero.world_size > 1 and len(params) > 1:
            elements = sum(zero._share(param) for param in params) * zero.world_size
            flat = zero.buffers.on_gpu(elements, zero.dtype, "communication")
        else:
            for param in params:
                _resize(param, param.numel())
        if zero.world_size > 1 and zero.offloads:  # The shares come from the host.
            shares = [zero.buffers.on_gpu(zero._share(param), zero.dtype, "communication") for param in params]
            del shares
        return flat

    def _wait(self, gather: _Gather) -> None:
        """Wait for parameters, and copy them out of their buffer."""
        if gather.is_complete:
            return
        gather.is_complete = True
        with torch.cpu.stream(self.zero.gather_stream):
            for param in gather.params:
                if gather.flat is not None:
                    _resize(param, param.numel())
                self.available.add(param)

    @torch.no_grad()
    def _release(self, module: nn.Module) -> None:
        kept = self._needed_soon() if self.order else set()
        for param in module.parameters(recurse=False):
            self.active[param].discard(module)
            if (self.order and param in self.persistent) or param in kept or self.active[param]:
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
        _resize(param, 0)
        self.available.discard(param)
        self.live -= param.numel()

    @torch.no_grad()
    def _reset(self) -> None:
        """Start a forward pass (``reset_step``). The order of the first one with a backward pass is used for all."""
        for param in list(self.registry):
            self._wait(self.registry.pop(param))
            if not self.active[param]:
                self._free(param)
        if not self.order:
            self.order = tuple(self.recorded)
        self.recorded = []
        self.queue = deque(
            (param, index) for index, module in enumerate(self.order) for param in module.parameters(recurse=False)
        )
        self.next_use, self.position, self.live = {}, 0, 0

    def release_all(self) -> None:
        """Free all gathered parameters, before the optimizer step (``_partition_all_parameters``)."""
        if not self.gathers:
            return
        for param in list(self.registry):
            self._wait(self.registry.pop(param))
        for param in list(self.available):
            self.active[param].clear()
            self._free(param)

    def gather_persistent(self) -> None:
        """Gather small parameters, which stay until the next optimizer step."""
        if self.gathers:
            for param in self.zero.persistent:
                _resize(param, param.numel())
                self.available.add(param)


def cut_into_sub_groups(sizes: Sequence[int], limit: int) -> list[int]:
    """Return the elements of the sub-groups of a group of shares (``_create_fp16_sub_groups``)."""
    found = [0]
    for size in sizes:
        if found[-1] >= limit:
            found.append(0)
        found[-1] += size
    return found


def _stream(*, is_new: bool) -> Any:
    return torch.cpu.Stream() if is_new else torch.cpu.current_stream()


def _resize(param: nn.Parameter, elements: int) -> None:
    param.untyped_storage().resize_(elements * param.element_size())

"""The gathers of ZeRO's stage 3: when the parameters of a module are whole, and in which buffers they arrive.

Hooks gather the parameters of a module before its forward and backward pass, and free them afterwards. Names in
comments are those of DeepSpeed 0.19.8, ``deepspeed/runtime/zero/partitioned_param_coordinator.py``.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distexp.plan.trace.zero12 import Buffers, read_zero, resize_storage, share_of


@dataclass
class _Gather:
    """Parameters that are on the way, and the buffer that they arrive in. It exists until all of them were used."""

    params: list[nn.Parameter]
    flat: Tensor | None
    is_complete: bool = False


@dataclass(frozen=True)
class Receiver:
    """Allocates what gathered parameters arrive in."""

    buffers: Buffers
    dtype: torch.dtype  # of the parameters
    world_size: int
    offloads: bool  # whether the shares are on the host
    stream: Any  # of the gathers

    def receive(self, params: Sequence[nn.Parameter]) -> Tensor | None:
        """Allocate what parameters arrive in: a buffer for several, or the parameter itself."""
        flat = None
        if self.world_size > 1 and len(params) > 1:
            elements = sum(share_of(param, self.world_size) for param in params) * self.world_size
            flat = self.buffers.on_gpu(elements, self.dtype, "communication")
        else:
            for param in params:
                resize_storage(param, param.numel())
        if self.world_size > 1 and self.offloads:  # The shares come from the host.
            sizes = [share_of(param, self.world_size) for param in params]
            shares = [self.buffers.on_gpu(size, self.dtype, "communication") for size in sizes]
            del shares
        return flat


class Fetcher:
    """Gathers parameters ahead of their use, in the order of the first micro-batch."""

    def __init__(
        self,
        receiver: Receiver,
        persistent: Collection[nn.Parameter],
        partition_order: Mapping[nn.Parameter, int],
        settings: dict[str, Any],
    ) -> None:
        """Create a fetcher. Persistent parameters are small, and stay until the next optimizer step."""
        self.receiver, self.persistent, self.partition_order = receiver, persistent, partition_order
        self.gathers = receiver.world_size > 1 or receiver.offloads
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
        params = sorted(needed, key=self.partition_order.__getitem__)
        if not params:
            return
        self.live += sum(param.numel() for param in params)
        with torch.cpu.stream(self.receiver.stream):
            gather = _Gather(params, self.receiver.receive(params))
        self.registry.update((param, gather) for param in params)

    def _wait(self, gather: _Gather) -> None:
        """Wait for parameters, and copy them out of their buffer."""
        if gather.is_complete:
            return
        gather.is_complete = True
        with torch.cpu.stream(self.receiver.stream):
            for param in gather.params:
                if gather.flat is not None:
                    resize_storage(param, param.numel())
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
        resize_storage(param, 0)
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
        for param in filter(self.available.__contains__, self.partition_order):
            self.active[param].clear()
            self._free(param)

    def gather_persistent(self) -> None:
        """Gather small parameters, which stay until the next optimizer step."""
        if self.gathers:
            for param in self.persistent:
                resize_storage(param, param.numel())
                self.available.add(param)

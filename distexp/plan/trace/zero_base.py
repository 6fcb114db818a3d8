"""What the stages 1 to 3 of ZeRO have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from distexp.config import Config
from distexp.strategies.optimizer import parameter_groups

CHECKED_VERSION = "0.19.8"  # version of DeepSpeed with which the models of ZeRO's memory were checked
DEFAULT_BUCKET = 500_000_000  # DeepSpeed's default of reduce_bucket_size in elements


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
        self.bucket_size = int(read_zero(settings, "reduce_bucket_size", DEFAULT_BUCKET))
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

"""Fake tensors with the sizes of DeepSpeed's buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distexp.config import Config

Assign = Callable[[str, Iterable[Tensor]], None]
"""Sets the part of tensors, see ``distexp.plan.step_trace.PARTS``."""


@dataclass(frozen=True)
class Buffers:
    """Allocates fake tensors on the GPU and on the host.

    Attributes:
        gpu: the device that the recorder counts as the GPU.
        states: where the optimizer states are; ``cpu`` if they are offloaded.
        pinned: whether offloaded tensors are page-locked. The host allocator rounds these to a power of two.
        assign: sets the part of a tensor.
        empty_cache: returns the free segments of the GPU's allocator.
    """

    gpu: torch.device
    states: torch.device
    pinned: bool
    assign: Assign
    empty_cache: Callable[[], None]

    @classmethod
    def of(cls, config: Config, gpu: torch.device, assign: Assign, empty_cache: Callable[[], None]) -> Buffers:
        """Return the buffers of a configuration."""
        offload = config.offload
        states = torch.device("cpu") if offload.enabled else gpu
        return cls(gpu, states, offload.enabled and offload.pin_memory, assign, empty_cache)

    def on_gpu(self, elements: int, dtype: torch.dtype, part: str) -> Tensor:
        """Return a tensor on the GPU."""
        return self._allocate(elements, dtype, part, self.gpu)

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

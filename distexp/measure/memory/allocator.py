"""torch's own account of a GPU's memory, per rank."""

from __future__ import annotations

from typing import Any

import torch

from distexp.system.units import MIB


class AllocatorWatch:
    """What is allocated at the ends of steps and before updates; peaks are torch's own."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self.device, self.rank = device, rank
        self.total = self.samples = self.states = 0

    def before_update(self) -> None:
        """Gradients are there and activations are gone: what is allocated is the model's states, and buffers."""
        if self.device.type == "cuda":
            self.states = torch.cuda.memory_allocated(self.device)

    def sample(self) -> None:
        """A step is done; costs microseconds, and no wait for the device."""
        if self.device.type == "cuda":
            self.total += torch.cuda.memory_allocated(self.device)
            self.samples += 1

    def summary(self) -> dict[str, Any] | None:
        """An entry of ``memory.torch`` in MiB; None on the CPU, which has no such allocator."""
        if self.device.type != "cuda":
            return None
        average = self.total / self.samples / MIB if self.samples else None
        states = self.states / MIB if self.samples > 1 else None  # the first update makes the optimizer's
        return {**peaks(self.device, self.rank), "average_allocated_mib": average, "states_mib": states}


def peaks(device: torch.device, rank: int) -> dict[str, Any]:
    """The peaks of a rank's allocator since its start, in MiB."""
    statistics = torch.cuda.memory_stats(device)
    return {
        "rank": rank,
        "peak_allocated_mib": statistics["allocated_bytes.all.peak"] / MIB,
        "average_allocated_mib": None,
        "states_mib": None,
        "peak_reserved_mib": statistics["reserved_bytes.all.peak"] / MIB,
        "alloc_retries": statistics["num_alloc_retries"],
    }

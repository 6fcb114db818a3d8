"""GPU memory of one rank, as the CUDA caching allocator of torch reports it."""

from __future__ import annotations

from typing import Any

import torch

from distexp.distributed.process_group import gather_to_all
from distexp.measure.watcher import MeasuredSteps, Step, Watcher
from distexp.system.units import MIB

PEAKS = ("peak_allocated_mib", "peak_reserved_mib")


class AllocatorWatch(Watcher):
    """Samples of allocated memory after each step and before each update, and the allocator's peaks."""

    section = "memory"

    def __init__(self, device: torch.device, rank: int) -> None:
        self.device, self.rank = device, rank
        self.total = self.samples = self.states = 0
        self._kept: dict[str, Any] = {}  # peaks before they were reset

    def before_update(self) -> None:
        """Record the allocated memory: model states, gradients and buffers, but no activations."""
        if self.device.type == "cuda":
            self.states = torch.cuda.memory_allocated(self.device)

    def after_step(self, step: Step) -> None:
        """Record the allocated memory; takes microseconds and does not synchronize."""
        if self.device.type == "cuda":
            self.total += torch.cuda.memory_allocated(self.device)
            self.samples += 1

    def keep_peaks(self) -> None:
        """Keep the peaks, which are about to be reset."""
        self._kept = self._peaks()

    def _peaks(self) -> dict[str, Any]:
        peaks = allocator_peaks(self.device, self.rank)
        return peaks | {name: max(peaks[name], self._kept.get(name, 0.0)) for name in PEAKS}

    def summary(self, steps: MeasuredSteps) -> dict[str, Any]:
        """Return ``memory.torch`` in MiB, which is empty on the CPU. A collective."""
        return {"torch": [entry for entry in gather_to_all(self._entry()) if entry is not None]}

    def _entry(self) -> dict[str, Any] | None:
        if self.device.type != "cuda":
            return None
        average = self.total / self.samples / MIB if self.samples else None
        states = self.states / MIB if self.samples > 1 else None  # the first update creates the optimizer states
        return {**self._peaks(), "average_allocated_mib": average, "states_mib": states}


def allocator_peaks(device: torch.device, rank: int) -> dict[str, Any]:
    """Return the allocator's peaks in MiB since the process started, or since the last reset."""
    statistics = torch.cuda.memory_stats(device)
    return {
        "rank": rank,
        "peak_allocated_mib": statistics["allocated_bytes.all.peak"] / MIB,
        "average_allocated_mib": None,
        "states_mib": None,
        "peak_reserved_mib": statistics["reserved_bytes.all.peak"] / MIB,
        "alloc_retries": statistics["num_alloc_retries"],
    }

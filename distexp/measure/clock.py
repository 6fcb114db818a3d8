"""How long each step took, without waiting for the device inside the window that is measured."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch


class StepClock:
    """Marks the ends of steps on a device's own time line.

    On a GPU the marks are CUDA events, which cost nothing until they are read; on the CPU they are
    readings of the clock. ``restart`` begins a new series, so that what lies between two series
    (an evaluation, say) belongs to no step.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.series: list[list[Any]] = []

    def restart(self) -> None:
        """Waits for the device, and starts a series here."""
        synchronize(self.device)
        self.series.append([self._now()])

    def mark(self) -> None:
        """The end of a step."""
        self.series[-1].append(self._now())

    def durations(self, last: int | None = None) -> list[float]:
        """Seconds of every step so far, or of the last ones; waits for the device."""
        synchronize(self.device)
        pairs = [pair for series in self.series for pair in pairwise(series)]
        return [self._between(start, end) for start, end in pairs[-last if last else 0 :]]

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        if self.device.type != "cuda":
            return float(end - start)
        return float(start.elapsed_time(end)) / 1000


def synchronize(device: torch.device) -> None:
    """Waits until a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def quantiles(durations: list[float]) -> dict[str, float] | None:
    """Median, 90th percentile and maximum of some seconds; None of none."""
    if not durations:
        return None
    ordered = torch.tensor(durations, dtype=torch.float64)
    return {
        "p50": ordered.quantile(0.5).item(),
        "p90": ordered.quantile(0.9).item(),
        "max": ordered.max().item(),
    }

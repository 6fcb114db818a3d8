"""Duration of training steps, measured without synchronizing the device between steps."""

import math
import statistics
import time
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any

import torch

BLOCKS = 10  # of consecutive steps, for the error of the mean


class StepClock:
    """Marks the end of each step on the device's timeline.

    On a GPU the marks are CUDA events, so they do not stall the device. On the CPU they are clock readings.
    ``restart`` starts a new series, so that the time between two series (an evaluation, for example) is not counted.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.series: list[list[Any]] = []

    def restart(self) -> None:
        """Synchronize the device and start a new series."""
        synchronize(self.device)
        self.series.append([self._now()])

    def mark(self) -> None:
        """Mark the end of a step."""
        self.series[-1].append(self._now())

    def durations(self, last: int | None = None) -> list[float]:
        """Synchronize the device; return the seconds of all steps, or of the ``last`` ones."""
        synchronize(self.device)
        # The newest step is first, because a line of the log needs a few of many thousands.
        steps = (step for series in reversed(self.series) for step in pairwise(reversed(series)))
        pairs = list(islice(steps, last))[::-1]
        if self.device.type != "cuda":
            return [end - start for end, start in pairs]
        return [start.elapsed_time(end) / 1000 for end, start in pairs]

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def quantiles(durations: Sequence[float]) -> dict[str, float] | None:
    """Return median, 90th percentile and maximum of durations, or None if there are none."""
    if not durations:
        return None
    ordered = torch.tensor(durations, dtype=torch.float64)
    return {"p50": ordered.quantile(0.5).item(), "p90": ordered.quantile(0.9).item(), "max": ordered.max().item()}


def speed_error(durations: list[float]) -> dict[str, float] | None:
    """Return the relative standard error of the mean step time, and so of the speed; None for fewer than two steps.

    Consecutive steps are correlated, for example while another program uses the cores. So the error is computed from
    the means of blocks of consecutive steps, which are nearly independent. This is the method of batch means (B.
    Schmeiser, Operations Research 30, 1982). Differences between runs are not in it, so it is a lower bound.
    """
    blocks = min(BLOCKS, len(durations))
    if blocks < 2:
        return None
    size = len(durations) // blocks
    counted = durations[len(durations) - blocks * size :]
    means = [statistics.fmean(counted[start : start + size]) for start in range(0, len(counted), size)]
    error = statistics.stdev(means) / math.sqrt(blocks)
    return {"relative": error / statistics.fmean(means), "blocks": float(blocks)}

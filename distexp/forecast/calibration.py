"""Calibration: the profiled run's own size must give its own measured median.

The profiler slows down the CPU and not the kernels. So first the times of the CPU shrink until the simulated step is as
long as the median of the steps that were not profiled. If that is not enough, the times of the kernels shrink too,
because the profiled step had more work. A rest that no part explains, as the wait for other ranks, is added to each
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distexp.forecast.micro_batches import with_micro_batches
from distexp.forecast.settings import CommunicationSettings
from distexp.forecast.simulate import Scales, simulate
from distexp.runs.step_model import Collective, Item, StepModel

LEAST_HOST = 0.3
"""Smallest factor of the CPU's times on a GPU: more than the profiler's overhead is work that the step did not have."""
ROUNDS = 50


@dataclass(frozen=True)
class Calibration:
    """Factors of the times of the profiled step, and what they do not explain.

    Attributes:
        scales: Factors of the CPU's and of the device's times.
        other_s: Seconds of a step that the simulation does not explain.
    """

    scales: Scales
    other_s: float = 0.0


def calibrate(items: Sequence[Item], model: StepModel, settings: CommunicationSettings, median_s: float) -> Calibration:
    """Return the factors with which the simulation gives the measured median.

    Args:
        items: Items of the profiled step.
        model: The profiled step.
        settings: Settings of its communication.
        median_s: Median of the steps that were not profiled.
    """
    own = with_micro_batches(items, model.micro_batches, model.micro_batches, settings)
    durations = [(item.transfer_s or 0.0) if isinstance(item, Collective) else 0.0 for item in own]

    def step_s(scales: Scales) -> float:
        return simulate(own, durations, on_gpu=model.on_gpu, scales=scales).step_s

    if not model.on_gpu:
        return _fit(lambda factor: Scales(factor, 1.0), step_s, median_s, 0.0, 10.0)
    if step_s(Scales(LEAST_HOST, 1.0)) > median_s:
        return _fit(lambda factor: Scales(LEAST_HOST * factor, factor), step_s, median_s, 0.0, 1.0)
    return _fit(lambda factor: Scales(factor, 1.0), step_s, median_s, LEAST_HOST, 1.0)


def _fit(
    scales: Callable[[float], Scales], step_s: Callable[[Scales], float], median_s: float, low: float, high: float
) -> Calibration:
    """Return the factor between two limits whose step is as long as the median; the step grows with the factor."""
    if step_s(scales(high)) <= median_s:
        found = scales(high)
        return Calibration(found, median_s - step_s(found))
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if step_s(scales(middle)) < median_s else (low, middle)
    found = scales(high)
    return Calibration(found, median_s - step_s(found))

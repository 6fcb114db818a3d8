"""Calibration: the profiled run's own size must give its own measured median.

The profiler slows down the CPU and not the kernels, usually by TYPICAL_HOST. If the simulated step then is about as
long as the median of the steps that were not profiled, all times are scaled by the same small factor. Otherwise the
times of the CPU are scaled. If that is not enough, those of the kernels are scaled too, because the profiled step had
more work. A rest that no part explains is added to each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from distexp.forecast.simulate import Scales

TYPICAL_HOST = 0.6
"""Time of the CPU for a launch without the profiler, as a fraction of that with it (docs/results/explain.md)."""
MIN_HOST_FACTOR = 0.3
"""Smallest factor of the CPU's times on a GPU: more than the profiler's overhead is work that the step did not have."""
CLOSE = 0.03
"""Relative difference up to which all times are scaled alike."""
EXACT = 1e-4
"""Relative difference that a factor may leave. It becomes ``other_s``."""
ROUNDS = 30


@dataclass(frozen=True)
class Calibration:
    """Factors of the times of the profiled step, and what they do not explain.

    Attributes:
        scales: Factors of the CPU's and of the device's times.
        other_s: Seconds of a step that the simulation does not explain.
    """

    scales: Scales
    other_s: float = 0.0


StepTime = Callable[[Scales], float]
"""The simulated step of the profiled run's own size in seconds; it grows with the factors."""


def calibrate(step_s: StepTime, median_s: float, *, on_gpu: bool) -> Calibration:
    """Return the factors with which the simulation gives the measured median.

    Args:
        step_s: The simulation.
        median_s: Median of the steps that were not profiled.
        on_gpu: Whether kernels run on a device.
    """
    if not on_gpu:
        return _fit(lambda factor: Scales(factor, 1.0), step_s, median_s, (0.0, 10.0))
    if abs(step_s(Scales(TYPICAL_HOST, 1.0)) - median_s) <= CLOSE * median_s:
        return _fit(lambda factor: Scales(TYPICAL_HOST * factor, factor), step_s, median_s, (0.9, 1.1))
    if step_s(Scales(MIN_HOST_FACTOR, 1.0)) > median_s:
        return _fit(lambda factor: Scales(TYPICAL_HOST * factor, factor), step_s, median_s, (0.0, 1.0))
    return _fit(lambda factor: Scales(factor, 1.0), step_s, median_s, (MIN_HOST_FACTOR, 1.0))


def _fit(
    scales: Callable[[float], Scales], step_s: StepTime, median_s: float, limits: tuple[float, float]
) -> Calibration:
    """Return the factor between two limits with which the step is as long as the median."""
    low, high = limits
    factor, rest = high, median_s - step_s(scales(high))
    for _ in range(ROUNDS):
        if (rest >= 0 and factor == limits[1]) or abs(rest) <= EXACT * median_s:
            break
        factor = (low + high) / 2
        rest = median_s - step_s(scales(factor))
        low, high = (factor, high) if rest > 0 else (low, factor)
    return Calibration(scales(factor), rest)

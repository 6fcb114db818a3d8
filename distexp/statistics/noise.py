"""Noise of a metric: by how much its mean may change if the runs are repeated.

The noise is half of a 95 % confidence interval (Georges et al., Statistically Rigorous Java Performance Evaluation,
OOPSLA 2007). It has two sources:

- Repeats: the relative standard deviation of all repeats of a task on a device, pooled as in an analysis of variance.
- Step times: the standard error of a run's speed by batch means, as in ``distexp.measure.clock.speed_error``.

The noise of a speed is the larger of the two. Other metrics have the first one only. Without repeats, speeds and memory
on CPU have at least the noise of other programs on the machine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distexp.runs.entry_values import number_of

SINGLE_CPU_RUN = 0.4
"""Least relative noise of a speed on CPU without repeats.

Other programs share the cores. Equal runs on two cores differed by 1.7x, although the steps of each were even.
"""

CPU_MEMORY_MIB = 200.0
"""Noise of the peak CPU memory of a run without repeats, in MiB.

The kernel divides the pages of libraries among all processes that map them. Equal runs had 710 MiB alone,
and 541 MiB next to four idle processes that import torch.
"""

T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""97.5 % quantiles of Student's t distribution for 1 to 9 degrees of freedom."""

NORMAL_95 = 1.96


@dataclass(frozen=True)
class Deviation:
    """Relative standard deviation of a single run, and the degrees of freedom of this estimate."""

    relative: float
    degrees_of_freedom: int

    def noise_of_mean(self, count: int) -> float:
        """Return the relative noise of the mean of some runs."""
        return t_quantile(self.degrees_of_freedom) * self.relative / math.sqrt(count)


@dataclass(frozen=True)
class Spread:
    """Mean of a metric over several runs.

    Attributes:
        deviation: Sample standard deviation; None for a single value.
        noise: Half of the 95 % confidence interval of the mean; None if unknown.
    """

    mean: float
    deviation: float | None
    noise: float | None = None


def t_quantile(degrees_of_freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution, to 1 %.

    Source of the formula for many degrees of freedom: Abramowitz and Stegun, *Handbook of Mathematical Functions*,
    26.7.5, up to the first order.
    """
    if degrees_of_freedom <= len(T_95):
        return T_95[degrees_of_freedom - 1]
    return NORMAL_95 * (1 + (1 + NORMAL_95**2) / (4 * degrees_of_freedom))


def distinct_ratio(noise: float) -> float:
    """Return the ratio from which two values with this relative noise differ beyond it.

    It is the q for which q - 1 equals noise * sqrt(q**2 + 1), the noise of the difference.
    """
    return (1 + noise * math.sqrt(2 - noise**2)) / (1 - noise**2)


def pool_deviations(repeats: Iterable[Sequence[float]]) -> Deviation | None:
    """Return the relative deviation within sets of equal runs; None if nothing was repeated."""
    squares, degrees_of_freedom = 0.0, 0
    for values in repeats:
        mean = statistics.fmean(values) if len(values) > 1 else 0.0
        if mean:
            squares += sum((value / mean - 1) ** 2 for value in values)
            degrees_of_freedom += len(values) - 1
    return Deviation(math.sqrt(squares / degrees_of_freedom), degrees_of_freedom) if degrees_of_freedom else None


def step_noise(error: dict[str, float] | None) -> float | None:
    """Return the relative noise of a speed from ``metrics.speed_error`` of a record."""
    known = error or {}
    blocks, relative = number_of(known, "blocks"), number_of(known, "relative")
    if blocks is None or blocks < 2 or relative is None:
        return None
    return t_quantile(int(blocks) - 1) * relative


def speed_noise(steps: float | None, device: object, *, repeats: float | None = None) -> float | None:
    """Return the relative noise of a speed: the largest one that is known; None if none is.

    Args:
        steps: Noise of the step times.
        device: Device of the run, such as ``cpu``.
        repeats: Noise between repeats; None if nothing was repeated.
    """
    floor = SINGLE_CPU_RUN if repeats is None and device == "cpu" else None
    return max((noise for noise in (steps, repeats, floor) if noise is not None), default=None)


def is_within_noise(one: Spread, other: Spread) -> bool | None:
    """Return whether a difference is within the noise; None if the noise is unknown."""
    noise = difference_noise(one, other)
    return None if noise is None else abs(one.mean - other.mean) <= noise


def difference_noise(one: Spread, other: Spread) -> float | None:
    """Return the noise of a difference of two independent means; None if unknown."""
    if one.noise is None or other.noise is None:
        return None
    return math.hypot(one.noise, other.noise)

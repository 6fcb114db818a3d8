"""Noise of a metric: by how much its mean may change if the runs are repeated.

The noise is half of a 95 % confidence interval (Georges et al., Statistically Rigorous Java Performance Evaluation,
OOPSLA 2007). It has two sources:

- Repeats: the relative standard deviation of all repeats of a task on a device, pooled as in an analysis of variance.
- Step times: the standard error of a run's speed by batch means, as in ``distexp.measure.clock.speed_error``.

The noise of a speed is the larger of the two. Other metrics have the first one only. Without repeats, speeds and memory
on CPU have at least the noise of other programs on the machine. Memory on CPU decides only what is more than Python and
the libraries need, also with repeats: these may be shared with an earlier run, and are no property of a strategy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, hypot, log, sqrt
from statistics import NormalDist, fmean

from distexp.system.typed_values import number_of

SINGLE_CPU_RUN = 0.4
"""Least relative noise of a speed on CPU without repeats, because other programs share the cores.
Equal runs on two cores differed by 1.7x, although the steps of each were even."""

SINGLE_STEP = 1.0
"""Relative noise of a speed that is from one step, which has no deviation. So it decides nothing."""

CPU_MEMORY_MIB = 200.0
"""Least noise of the peak CPU memory of a run, in MiB. The kernel divides the pages of libraries among all
processes that map them: equal runs had 710 MiB alone, and 541 MiB next to four idle processes that import torch."""


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
        return t_quantile(self.degrees_of_freedom) * self.relative / sqrt(count)


@dataclass(frozen=True)
class Spread:
    """Mean of a metric over several runs."""

    mean: float
    deviation: float | None  # sample standard deviation; None for a single value
    noise: float | None = None  # half of the 95 % confidence interval of the mean; None if unknown


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
    return (1 + noise * sqrt(2 - noise**2)) / (1 - noise**2)


def pool_deviations(repeats: Iterable[Sequence[float]]) -> Deviation | None:
    """Return the relative deviation within sets of equal runs; None if nothing was repeated."""
    squares, degrees_of_freedom = 0.0, 0
    for values in repeats:
        mean = fmean(values) if len(values) > 1 else 0.0
        if mean:
            squares += sum((value / mean - 1) ** 2 for value in values)
            degrees_of_freedom += len(values) - 1
    return Deviation(sqrt(squares / degrees_of_freedom), degrees_of_freedom) if degrees_of_freedom else None


def step_noise(error: dict[str, float] | None) -> float | None:
    """Return the relative noise of a speed from ``metrics.speed_error`` of a record."""
    known = error or {}
    blocks, relative = number_of(known, "blocks"), number_of(known, "relative")
    if blocks is None or blocks < 2 or relative is None:
        return None
    return t_quantile(int(blocks) - 1) * relative


def speed_noise(steps: float | None, device: object, *, repeats: float | None = None) -> float | None:
    """Return the relative noise of a speed: the largest one that is known; None if none is."""
    floor = SINGLE_CPU_RUN if repeats is None and device == "cpu" else None
    return max((noise for noise in (steps, repeats, floor) if noise is not None), default=None)


def cpu_memory_noise(processes: Iterable[float | None]) -> float:
    """Return the noise of a peak on CPU in MiB, from what the processes of some runs need in addition to tensors.

    The smallest known one counts, because the others may contain temporary tensors. The noise of a difference is
    sqrt(2) times as large. So runs that differ by less than their processes need are equal.
    """
    return max(CPU_MEMORY_MIB, min((mib for mib in processes if mib), default=0.0) / sqrt(2))


def is_within_noise(one: Spread, other: Spread) -> bool | None:
    """Return whether a difference is within the noise; None if the noise is unknown."""
    noise = difference_noise(one, other)
    return None if noise is None else abs(one.mean - other.mean) <= noise


def difference_noise(one: Spread, other: Spread) -> float | None:
    """Return the noise of a difference of two independent means; None if unknown."""
    if one.noise is None or other.noise is None:
        return None
    return hypot(one.noise, other.noise)


@dataclass(frozen=True)
class UsualErrors:
    """Errors of the forecasts that are usual before the first trial. With many trials, the measured ones decide.

    The logarithm of score / forecast is taken to be normal over the candidates. With few trials its distribution is
    Student's t, whose tails are heavier: unlikely candidates gain more than ``expected_gain``. So the 1 % of
    ``distexp choose`` is a rule that was tested with measured sweeps.
    """

    usual_error: float = 0.2  # error that is expected, as a standard deviation of the logarithm of score / forecast
    usual_error_trials: int = 1  # weight of the usual error next to the measured ones, in trials
    usual_scale_trials: int = 1  # weight of a forecast that is exact on average, next to the measured scales, in trials


def expected_gain(
    forecast: float, best: float, scales: Sequence[float], exact: float | None, usual: UsualErrors
) -> float:
    """Return the expected improvement of a candidate, relative to the best score: 0.01 is 1 %.

    Source of the formula: Jones, Schonlau and Welch, *Efficient Global Optimization of Expensive Black-Box Functions*,
    1998, equation 15, for the logarithms of the scores. ``scales`` are score / forecast of the candidates that were
    tried, at least one, and ``exact`` is that of forecasts without an error. If unknown, it is taken from the scales.
    """
    known = exact or exp(fmean(map(log, scales)))
    mean, deviation = _predicted_scale([log(scale / known) for scale in scales], usual)
    distance = (log(best / (forecast * known)) - mean) / deviation
    normal = NormalDist()
    return deviation * (distance * normal.cdf(distance) + normal.pdf(distance))


def _predicted_scale(logarithms: Sequence[float], usual: UsualErrors) -> tuple[float, float]:
    """Return mean and width of the distribution of the logarithm of the next candidate's scale.

    Source of the formula: Gelman et al., *Bayesian Data Analysis*, 3rd edition, section 3.3 (normal data with a
    conjugate prior). If the mean is unknown, one trial shows nothing of the variance, as in section 3.2.
    """
    count, center = len(logarithms), fmean(logarithms)
    weight = usual.usual_scale_trials
    squares = (
        usual.usual_error_trials * usual.usual_error**2
        + sum((each - center) ** 2 for each in logarithms)
        + weight * count / (weight + count) * center**2
    )
    freedom = usual.usual_error_trials + count - (0 if weight else 1)
    variance = squares / freedom * (1 + 1 / (count + weight))
    return center * count / (count + weight), sqrt(variance)


Point = tuple[int, float]  # a micro-batch and its memory in MiB


@dataclass(frozen=True)
class MemoryLine:
    """Line through the memory of a size, with the MiB of each further sample.

    ``distexp plan`` searches between two sizes by the line through the two nearest predictions. ``distexp choose`` goes
    down from a predicted size, by its activations. ``train.micro_batch_size=auto`` goes up from the sizes that ran.
    """

    size: int
    mib: float
    mib_per_sample: float

    @classmethod
    def through(cls, point: Point, other: Point) -> MemoryLine:
        """Return the line through two points."""
        return cls(*point, (other[1] - point[1]) / (other[0] - point[0]))

    def at(self, size: int) -> float:
        """Return the memory of a size in MiB."""
        return self.mib + self.mib_per_sample * (size - self.size)

    def largest_size(self, mib: float) -> int:
        """Return the largest size that this memory is enough for. The line must rise."""
        return int(self.size + (mib - self.mib) / self.mib_per_sample)

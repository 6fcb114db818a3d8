"""Bounds of "the same training": by how much the losses of equal trainings may differ.

Strategies and kernels add numbers in other orders. So the losses of equal trainings differ by rounding errors, which
grow with each update. There are two uses with their own bounds:

- A short trial (``distexp choose``) has a few steps from equal weights. Rounding errors have not grown yet, so a tight
  bound finds wrong arithmetic. An error of all steps in one direction is no rounding error, so 16-bit types also have a
  bound of the mean. fp16 has the bound of bf16, because its loss scale still changes in the first steps.
- A whole training (``distexp report``) has all logged steps, in which errors have grown. The loss scale of fp16 is
  settled then, and fp16 rounds eight times as finely as bf16.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan


@dataclass(frozen=True)
class LossBounds:
    """Largest differences between the losses of equal trainings."""

    step: float  # largest relative difference at any step
    mean: float | None = None  # largest mean of the signed relative differences; None: no such bound


SHORT_TRIAL = {"fp32": LossBounds(1e-5), "bf16": LossBounds(1e-2, 2e-3), "fp16": LossBounds(1e-2, 2e-3)}
WHOLE_TRAINING = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-3}  # only of a step


def whole_training_bound(precision: str) -> float:
    """Return the largest relative difference in a whole training; of an unknown precision, the widest one."""
    return WHOLE_TRAINING.get(precision, max(WHOLE_TRAINING.values()))


@dataclass(frozen=True)
class LossComparison:
    """Differences between the losses of two runs."""

    steps: int  # number of compared steps
    largest: float  # largest relative difference at any step
    mean: float  # mean of the signed relative differences
    bounds: LossBounds  # bounds for equal trainings

    @property
    def equal(self) -> bool:
        """Return whether both bounds hold."""
        return self.largest <= self.bounds.step and (self.bounds.mean is None or abs(self.mean) < self.bounds.mean)

    def __str__(self) -> str:
        limit = f"the bound is {self.bounds.step:g}"
        mean = "" if self.bounds.mean is None else f", on average {self.mean:+.1e} (bound {self.bounds.mean:g})"
        return f"{self.steps} steps, largest relative difference {self.largest:.1e} ({limit}){mean}"


def compare_trials(losses: Sequence[float], reference: Sequence[float], precision: str) -> LossComparison | None:
    """Compare the losses of two short trials; None if they have no equal number of steps, or no loss."""
    if not reference or len(losses) != len(reference):
        return None
    gaps = [_gap(loss, other) for loss, other in zip(losses, reference, strict=True)]
    return LossComparison(len(gaps), max(map(abs, gaps)), sum(gaps) / len(gaps), SHORT_TRIAL[precision])


def _gap(loss: float, other: float) -> float:
    """Return the relative difference; infinite if one of both is not finite."""
    gap = (loss - other) / max(abs(other), 1e-12)
    return inf if isnan(gap) else gap

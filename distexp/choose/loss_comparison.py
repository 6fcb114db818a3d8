"""Comparison of the losses of two runs with equal steps: whether they are the same training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan, nan
from pathlib import Path

from distexp.runs.entry_values import number_of
from distexp.runs.jsonl import read_entries
from distexp.runs.run_dir import METRICS


@dataclass(frozen=True)
class LossBounds:
    """Largest differences between the losses of equal trainings.

    Attributes:
        step: Largest relative difference at any step.
        mean: Largest mean of the signed relative differences; None: no such bound.
    """

    step: float
    mean: float | None


HALF = LossBounds(1e-2, 2e-3)
BOUNDS = {"fp32": LossBounds(1e-5, None), "bf16": HALF, "fp16": HALF}
"""Bounds by precision. Rounding errors are random in their sign, so their mean is smaller."""


@dataclass(frozen=True)
class LossComparison:
    """Differences between the losses of two runs.

    Attributes:
        steps: Number of compared steps.
        largest: Largest relative difference at any step.
        mean: Mean of the signed relative differences.
        bounds: Bounds for equal trainings.
    """

    steps: int
    largest: float
    mean: float
    bounds: LossBounds

    @property
    def equal(self) -> bool:
        """Return whether both bounds hold."""
        return self.largest <= self.bounds.step and (self.bounds.mean is None or abs(self.mean) < self.bounds.mean)

    def __str__(self) -> str:
        limit = f"the bound is {self.bounds.step:g}"
        mean = "" if self.bounds.mean is None else f", on average {self.mean:+.1e} (bound {self.bounds.mean:g})"
        return f"{self.steps} steps, largest relative difference {self.largest:.1e} ({limit}){mean}"


def read_losses(run_dir: Path) -> list[float]:
    """Return the loss of each step of a run with ``train.log_every=1``; empty if it logged none.

    A loss that is not finite is logged as null.
    """
    losses = [number_of(entry, "loss") for entry in read_entries(run_dir / METRICS) if "loss" in entry]
    return [nan if loss is None else loss for loss in losses]


def compare_losses(losses: Sequence[float], reference: Sequence[float], precision: str) -> LossComparison | None:
    """Compare the losses of two runs; None if they have no equal number of steps, or no loss."""
    if not reference or len(losses) != len(reference):
        return None
    gaps = [_gap(loss, other) for loss, other in zip(losses, reference, strict=True)]
    return LossComparison(len(gaps), max(map(abs, gaps)), sum(gaps) / len(gaps), BOUNDS[precision])


def _gap(loss: float, other: float) -> float:
    """Return the relative difference; infinite if one of both is not finite."""
    gap = (loss - other) / max(abs(other), 1e-12)
    return inf if isnan(gap) else gap

"""Measured values of a candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distexp.choose.candidate import Candidate, Objective, Trial


@dataclass(frozen=True)
class MeanMetrics:
    """Means over the trials of a candidate, weighted by their steps. None: not measured."""

    samples_per_second: float | None = None
    step_s: float | None = None
    peak_allocated_mib: float | None = None
    j_per_sample: float | None = None
    price_per_sample: float | None = None

    def dominates(self, other: MeanMetrics) -> bool:
        """Return whether these values are nowhere worse than others, and somewhere better."""
        pairs = [(own, theirs) for own, theirs in zip(self._costs(), other._costs(), strict=True) if own and theirs]
        return all(own <= theirs for own, theirs in pairs) and any(own < theirs for own, theirs in pairs)

    def _costs(self) -> tuple[float | None, ...]:
        """Return numbers of which less is better."""
        speed = self.samples_per_second
        return (1 / speed if speed else None, self.peak_allocated_mib, self.j_per_sample, self.price_per_sample)

    def value(self, objective: Objective) -> float | None:
        """Return what an objective is about; None if it was not measured."""
        return {
            Objective.THROUGHPUT: self.samples_per_second,
            Objective.ENERGY: self.j_per_sample,
            Objective.COST: self.price_per_sample,
            Objective.MEMORY: self.peak_allocated_mib,
        }[objective]


def mean_metrics(candidate: Candidate) -> MeanMetrics:
    """Return the means of the completed trials of a candidate."""
    trials = candidate.completed
    return MeanMetrics(
        _mean(trials, "samples_per_second"),
        _mean(trials, "step_s"),
        max((trial.peak_allocated_mib for trial in trials if trial.peak_allocated_mib is not None), default=None),
        _mean(trials, "j_per_sample"),
        _mean(trials, "price_per_sample"),
    )


def _mean(trials: Sequence[Trial], name: str) -> float | None:
    """Return the mean of a value; that of a speed is over the time, so it is the harmonic one."""
    known = [(getattr(trial, name), trial.steps) for trial in trials if getattr(trial, name)]
    if not known:
        return None
    steps = sum(count for _, count in known)
    if name == "samples_per_second":
        return float(steps / sum(count / value for value, count in known))
    return float(sum(value * count for value, count in known) / steps)


def measured_json(candidate: Candidate) -> dict[str, Any] | None:
    """Return what the trials of a candidate measured; None if it was not tried."""
    if not candidate.trials:
        return None
    values = mean_metrics(candidate)
    return {
        "samples_per_second": values.samples_per_second,
        "step_s": values.step_s,
        "peak_allocated_mib": values.peak_allocated_mib,
        "j_per_sample": values.j_per_sample,
        "price_per_sample": values.price_per_sample,
        "gpu_seconds": round(sum(trial.gpu_seconds for trial in candidate.trials), 1),
        "trials": [
            {
                "steps": trial.steps,
                "status": trial.status,
                "directory": None if trial.directory is None else str(trial.directory),
                "samples_per_second": trial.samples_per_second,
                "disturbed": trial.disturbed,
            }
            for trial in candidate.trials
        ],
    }

"""Comparison of two profiled runs, part by part, in milliseconds per sample."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from distexp.explain.step_profile import StepProfile
from distexp.runs.disturbance import describe_disturbance
from distexp.runs.step_parts import PARTS

SAME = 0.02
"""Smaller relative differences are no difference."""
MIN_SHARE = 0.15
"""Smallest share of all changes that the sentence names."""


@dataclass(frozen=True)
class PerSample:
    """A time of the runs A and B, in milliseconds per sample."""

    a: float
    b: float

    @property
    def change(self) -> float:
        """Return how much longer B takes."""
        return self.b - self.a

    def to_json(self) -> dict[str, float]:
        """Return both times for programs."""
        return {"a": self.a, "b": self.b}


@dataclass(frozen=True)
class ProfileComparison:
    """The profiled runs A and B."""

    a: StepProfile
    b: StepProfile

    def per_sample(self, name: str) -> PerSample:
        """Return the time of a part."""
        return self._per_sample(self.a.mean_ms(name), self.b.mean_ms(name))

    @property
    def totals(self) -> PerSample:
        """Return the time of a sample: the sum of the parts."""
        return self._per_sample(self.a.step_ms, self.b.step_ms)

    @property
    def medians(self) -> PerSample:
        """Return the time of a sample without the profiler; ``totals`` if one is unknown."""
        a_ms, b_ms = self.a.median_ms, self.b.median_ms
        return self.totals if a_ms is None or b_ms is None else self._per_sample(a_ms, b_ms)

    def _per_sample(self, a_ms: float, b_ms: float) -> PerSample:
        return PerSample(a_ms / self.a.samples_per_step, b_ms / self.b.samples_per_step)

    @property
    def noise(self) -> float | None:
        """Return the noise of the difference of both speeds, relative to the higher speed; None if it is unknown."""
        a_noise, b_noise = self.a.speed_noise, self.b.speed_noise
        if a_noise is None or b_noise is None:
            return None
        fastest = min(self.medians.a, self.medians.b)
        return math.hypot(a_noise * fastest / self.medians.a, b_noise * fastest / self.medians.b)

    @property
    def is_noise(self) -> bool:
        """Return whether the difference of the speeds is within the noise. The report has the same test."""
        times = self.medians.a, self.medians.b
        return self.noise is not None and 1 - min(times) / max(times) <= self.noise

    @property
    def disturbances(self) -> list[str]:
        """Return what shows that something else slowed a run down."""
        reasons = ((name, describe_disturbance(profile.record)) for name, profile in (("A", self.a), ("B", self.b)))
        return [f"{name} was disturbed: {reason}" for name, reason in reasons if reason]

    def sentence(self) -> str:
        """Return why B is slower or faster than A. The parts may include the profiler, so the medians decide."""
        a, b = self.medians.a, self.medians.b
        times = f"A needs {a:,.3f} ms per sample, and B {b:,.3f} ms"
        if self.disturbances:
            return (
                f"It is not decided which run is faster: {times}. {'. '.join(self.disturbances)}. Repeat this when no "
                "other program needs the machine."
            )
        if self.is_noise:
            return (
                f"A and B are equal within the noise (±{self.noise:.0%} of the higher speed): {times}. The parts below "
                "may differ only by noise, too. For a smaller noise, repeat both runs, and compare them with distexp "
                "report."
            )
        if abs(b - a) <= SAME * a:
            return f"A and B are equally fast: {times}."
        ratio = f"{b / a:.2f} times slower" if b > a else f"{a / b:.2f} times faster"
        if (self.totals.change > 0) != (b > a):
            return (
                f"B is {ratio} than A: {times}. The profiled steps do not show this: they take {self.totals.b:,.3f} ms "
                f"instead of {self.totals.a:,.3f} ms per sample. Profile more steps, for example with "
                "train.profile_steps=10."
            )
        return f"B is {ratio} than A: {times}. Largest changes: {', '.join(self._changes())}."

    def _changes(self) -> Iterator[str]:
        """Yield the parts that changed most, the largest change first."""
        changes = {name: self.per_sample(name).change for name in PARTS}
        least = MIN_SHARE * sum(map(abs, changes.values()))
        for name in sorted(PARTS, key=lambda part: -abs(changes[part])):
            if abs(changes[name]) >= least:
                yield f"{PARTS[name]} {changes[name]:+,.3f} ms"

    def to_json(self) -> dict[str, Any]:
        """Return the comparison for programs."""
        return {
            "ms_per_sample": self.totals.to_json(),
            "median_ms_per_sample": self.medians.to_json(),
            "noise": self.noise,
            "equal_within_noise": self.is_noise,
            "disturbances": self.disturbances,
            "parts_ms_per_sample": {name: self.per_sample(name).to_json() for name in PARTS},
            "sentence": self.sentence(),
        }

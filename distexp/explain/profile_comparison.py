"""Comparison of two profiled runs, part by part, in milliseconds per sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from distexp.explain.step_profile import StepProfile
from distexp.runs.step_parts import PARTS

SAME = 0.02
"""Smaller relative differences are no difference."""
MIN_SHARE = 0.15
"""Smallest share of all changes that the sentence names."""


@dataclass(frozen=True)
class ProfileComparison:
    """Two profiled runs."""

    before: StepProfile
    after: StepProfile

    def per_sample(self, name: str) -> tuple[float, float]:
        """Return a part of both runs, in milliseconds per sample."""
        return (
            self.before.mean_ms(name) / self.before.samples_per_step,
            self.after.mean_ms(name) / self.after.samples_per_step,
        )

    @property
    def totals(self) -> tuple[float, float]:
        """Return the times of a sample in both runs, in milliseconds."""
        return (
            self.before.step_ms / self.before.samples_per_step,
            self.after.step_ms / self.after.samples_per_step,
        )

    @property
    def medians(self) -> tuple[float, float]:
        """Return the times of a sample without the profiler, in milliseconds; ``totals`` if one is unknown."""
        before, after = self.before.median_ms, self.after.median_ms
        if before is None or after is None:
            return self.totals
        return before / self.before.samples_per_step, after / self.after.samples_per_step

    def sentence(self) -> str:
        """Return why B is slower or faster than A. The parts may include the profiler, so the medians decide."""
        before, after = self.medians
        times = f"{after:,.3f} ms instead of {before:,.3f} ms per sample"
        if abs(after - before) <= SAME * before:
            return f"A and B are equally fast: {times}."
        ratio = f"{after / before:.2f} times slower" if after > before else f"{before / after:.2f} times faster"
        return f"B is {ratio} than A, {times}. Largest changes: {', '.join(self._changes())}."

    def _changes(self) -> Iterator[str]:
        """Yield the parts that changed most, the largest change first."""
        changes = {name: after - before for name in PARTS for before, after in [self.per_sample(name)]}
        least = MIN_SHARE * sum(map(abs, changes.values()))
        for name in sorted(PARTS, key=lambda part: -abs(changes[part])):
            if abs(changes[name]) >= least:
                yield f"{PARTS[name]} {changes[name]:+,.3f} ms"

    def to_json(self) -> dict[str, Any]:
        """Return the comparison for programs."""
        parts = {name: dict(zip(("a", "b"), self.per_sample(name), strict=True)) for name in PARTS}
        return {
            "ms_per_sample": dict(zip(("a", "b"), self.totals, strict=True)),
            "median_ms_per_sample": dict(zip(("a", "b"), self.medians, strict=True)),
            "parts_ms_per_sample": parts,
            "sentence": self.sentence(),
        }

"""The bottleneck of a profiled step, and what would reduce it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from distexp.explain.advice import advise
from distexp.explain.batch_advice import larger_global_batches
from distexp.explain.sentences import (
    NAMED_SHARE,
    describe_bottleneck,
    describe_compute,
    describe_missing_cores,
    describe_ranks_ahead,
    largest_overhead,
)
from distexp.explain.slow_rank import are_others_ahead
from distexp.explain.step_profile import COMPUTE, StepProfile
from distexp.runs.entry_values import number_of, texts_of
from distexp.runs.record import RunRecord
from distexp.strategies.memory_traits import Advice, MemoryTraits

MIN_SHARE = 0.1
"""Smallest share of a step that is called a bottleneck."""


@dataclass(frozen=True)
class Explanation:
    """The bottleneck of a step.

    Attributes:
        bottleneck: Name of the part; ``compute`` if no other part is large enough.
        share: Fraction of the step.
        sentence: What the profile shows.
        alternatives: Overrides that would reduce it. Two overrides of one alternative are separated by a space.
        larger_batch: Those that make the global batch larger, and so change the training.
        reasons: Why each of them would help.
    """

    bottleneck: str
    share: float
    sentence: str
    alternatives: list[str] = field(default_factory=list)
    larger_batch: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return ``metrics.explanation`` of the record, where the bottleneck is named ``loss``."""
        return {
            "loss": self.bottleneck,
            "share": self.share,
            "sentence": self.sentence,
            "try": list(self.alternatives),
            "larger_global_batch": list(self.larger_batch),
            "reasons": dict(self.reasons),
        }

    @classmethod
    def from_json(cls, raw: Any) -> Explanation | None:
        """Return ``metrics.explanation`` of a record; None if it has none, or a damaged one."""
        if not isinstance(raw, dict):
            return None
        bottleneck, share, sentence = raw.get("loss"), number_of(raw, "share"), raw.get("sentence")
        if not isinstance(bottleneck, str) or not isinstance(sentence, str) or share is None:
            return None
        stored = raw.get("reasons")
        reasons = {str(key): str(text) for key, text in stored.items()} if isinstance(stored, dict) else {}
        return cls(bottleneck, share, sentence, texts_of(raw, "try"), texts_of(raw, "larger_global_batch"), reasons)


def explain(record: RunRecord, strategy: MemoryTraits | None = None) -> Explanation | None:
    """Return the bottleneck of a run; None if it was not profiled.

    Args:
        record: The record.
        strategy: Strategy of the run; None: that of the record, if distexp ships it.
    """
    profile = StepProfile.of(record, strategy)
    return None if profile is None else explain_profile(profile)


def explain_profile(profile: StepProfile) -> Explanation:
    """Return the bottleneck of a profile."""
    shares = profile.shares()
    bottleneck, share = largest_overhead(shares)
    if share < MIN_SHARE:
        bottleneck, share = "compute", sum(shares[name] for name in COMPUTE)
    advice = advise(bottleneck, profile)
    if bottleneck == "compute":
        sentence = describe_compute(share, shares)
        advice += _advice_on_largest_overhead(profile)
    elif bottleneck == "waiting" and are_others_ahead(profile):
        bottleneck, share = "launch_idle", profile.slowest.time_ms("launch_idle") / profile.slowest.step_ms
        sentence = describe_ranks_ahead(share, profile)
    else:
        sentence = describe_bottleneck(bottleneck, share, profile)
    text = f"{sentence} {describe_missing_cores(profile)}".rstrip()
    reasons = dict(reversed(advice))  # If two give the same overrides, the first one has the reason.
    alternatives = list(dict.fromkeys(overrides for overrides, _ in advice))
    return Explanation(bottleneck, share, text, alternatives, larger_global_batches(profile, alternatives), reasons)


def _advice_on_largest_overhead(profile: StepProfile) -> list[Advice]:
    """Return what would reduce the largest part other than the kernels, if it is large enough to be named."""
    name, share = largest_overhead(profile.shares())
    return advise(name, profile) if share >= NAMED_SHARE else []

"""The largest loss of a profiled step, and what would reduce it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distexp.explain.advice import advise, larger_global_batches
from distexp.explain.slow_rank import are_others_ahead, describe_excess, is_one_rank_slow, slower_by
from distexp.explain.step_profile import COMPUTE, StepProfile
from distexp.runs.checked_values import number_of
from distexp.runs.record import RunRecord
from distexp.runs.step_parts import PARTS

MIN_SHARE = 0.1
"""Smallest share of a step that is called a loss."""
BOUND_SHARE = 0.3
"""Share from which a run is bound by a loss."""
COMPUTE_BOUND_SHARE = 0.7
"""Share of kernels from which a run without a loss is compute-bound."""

LOSSES = ("exposed_communication", "waiting", "launch_idle", "data_wait", "optimizer", "host")
BOUND = {
    "exposed_communication": "communication-bound",
    "waiting": "waiting for a slow rank",
    "launch_idle": "launch-bound",
    "data_wait": "data-bound",
    "optimizer": "optimizer-bound",
    "host": "bound by the CPU",
}
CAUSES = {
    "matmul": "matrix kernels",
    "other_kernels": "other kernels",
    "launch_idle": "launching kernels",
    "data_wait": "waiting for its data",
    "optimizer": "the optimizer",
    "host": "work of its CPU",
}


@dataclass(frozen=True)
class Explanation:
    """The largest loss of a step.

    Attributes:
        loss: Name of a part, or ``compute`` if no part is a loss.
        share: Fraction of the step.
        sentence: What the profile shows.
        alternatives: Overrides that would reduce it. Two overrides of one alternative are separated by a space.
        larger_batch: Those that make the global batch larger, and so change the training.
    """

    loss: str
    share: float
    sentence: str
    alternatives: list[str] = field(default_factory=list)
    larger_batch: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return ``metrics.explanation`` of the record."""
        return {
            "loss": self.loss,
            "share": self.share,
            "sentence": self.sentence,
            "try": list(self.alternatives),
            "larger_global_batch": list(self.larger_batch),
        }


def explain(record: RunRecord) -> Explanation | None:
    """Return the largest loss of a run; None if it was not profiled."""
    profile = StepProfile.of(record)
    return None if profile is None else explain_profile(profile)


def explain_profile(profile: StepProfile) -> Explanation:
    """Return the largest loss of a profile."""
    shares = profile.shares()
    loss = max(LOSSES, key=lambda name: shares[name])
    share = shares[loss]
    if share < MIN_SHARE:
        loss, share = "compute", sum(shares[name] for name in COMPUTE)
    alternatives = advise(loss, profile)
    if loss == "compute":
        sentence = _describe_compute(share, shares)
    elif loss == "waiting" and are_others_ahead(profile):
        loss, share = "launch_idle", profile.slowest.time("launch_idle") / profile.slowest.step_ms
        sentence = _sentence(loss, share, _describe_ranks_ahead(share, profile))
    else:
        sentence = _sentence(loss, share, _describe(loss, share, profile))
    return Explanation(loss, share, sentence, alternatives, larger_global_batches(profile, alternatives))


def _sentence(loss: str, share: float, description: str) -> str:
    text = f"{BOUND[loss]}: {description}" if share >= BOUND_SHARE else description
    return text[0].upper() + text[1:] + "."


def _describe_compute(share: float, shares: Mapping[str, float]) -> str:
    """Return what the kernels take and, if this is not most of the step, the two largest losses."""
    kernels = f"matrix kernels take {shares['matmul']:.0%} and other kernels {shares['other_kernels']:.0%} of the step"
    if share >= COMPUTE_BOUND_SHARE:
        return f"Compute-bound: {kernels}."
    first, second = sorted(LOSSES, key=lambda name: -shares[name])[:2]
    return f"No loss is large: {kernels}, {_share(first, shares)} and {_share(second, shares)}."


def _share(name: str, shares: Mapping[str, float]) -> str:
    return f"{PARTS[name]} {shares[name]:.1%}"


def _describe(loss: str, share: float, profile: StepProfile) -> str:
    """Return what a loss is, without the period."""
    if loss == "launch_idle":
        return f"the GPU is idle for {share:.0%} of the step, because the CPU launches {_launches(profile)} too slowly"
    if loss == "waiting":
        return _describe_waiting(share, profile)
    if loss == "exposed_communication":
        return f"communication that no computation hides takes {share:.0%} of the step{_largest_collective(profile)}"
    if loss == "data_wait":
        loaders = profile.number("dataset.num_workers", 0)
        return f"the training waits for its data for {share:.0%} of the step, with dataset.num_workers={loaders}"
    if loss == "optimizer":
        return f"clipping and the update of the weights take {share:.0%} of the step"
    return f"the CPU does other work than launching kernels for {share:.0%} of the step" if profile.on_gpu else (
        f"the CPU spends {share:.0%} of the step outside of operators and collectives, for example in Python"
    )  # fmt: skip


def _describe_ranks_ahead(share: float, profile: StepProfile) -> str:
    """Return that the slowest rank is launch-bound, as the others are."""
    return (
        f"the GPU of rank {profile.slowest.rank} is idle for {share:.0%} of the step, because the CPU launches "
        f"{_launches(profile)} too slowly. The other ranks are as slow, but ahead: their GPUs wait in collectives"
    )


def _launches(profile: StepProfile) -> str:
    launches = max((rank.launches or 0.0) for rank in profile.ranks)
    steps = profile.number("train.gradient_accumulation_steps", 1)
    return f"{round(launches / steps):,} kernels per micro-batch" if launches else "kernels"


def _describe_waiting(share: float, profile: StepProfile) -> str:
    if not is_one_rank_slow(profile):
        return f"ranks wait for each other for {share:.0%} of the step, and no single rank is the cause"
    cause, _ = slower_by(profile)
    return (
        f"the ranks wait for rank {profile.slowest.rank} for {share:.0%} of the step, because it spends "
        f"{describe_excess(profile)} more than the others on {CAUSES[cause]}"
    )


def _largest_collective(profile: StepProfile) -> str:
    entries = (profile.record.metrics.communication or {}).get("by_collective")
    found = {kind: number_of(entries, kind) for kind in entries} if isinstance(entries, dict) else {}
    kinds = {kind: share for kind, share in found.items() if share is not None}
    if not kinds:
        return ""
    largest = max(kinds, key=lambda kind: kinds[kind])
    return f", most of it {largest}" if len(kinds) > 1 else f", in {largest}"

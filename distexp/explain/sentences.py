"""The sentence about the bottleneck of a profiled step."""

from __future__ import annotations

from collections.abc import Mapping

from distexp.explain.slow_rank import (
    describe_excess,
    had_no_core,
    is_one_rank_slow,
    slow_part,
    without_core_excess_ms,
)
from distexp.explain.step_profile import OVERHEADS, StepProfile
from distexp.runs.step_parts import PARTS

BOUND_SHARE = 0.3
"""Share from which a run is bound by its bottleneck."""

COMPUTE_BOUND_SHARE = 0.7
"""Share of kernels from which a run without a bottleneck is compute-bound."""

NAMED_SHARE = 0.05
"""Share from which the largest part other than the kernels is named in a compute-bound run."""

NOTED_WAIT_FOR_CORES = 0.1
"""Share of a step without cores from which the parts of a CPU are not those of the training alone."""

BOUND = {
    "exposed_communication": "communication-bound",
    "waiting": "waiting for a slow rank",
    "launch_idle": "launch-bound",
    "data_wait": "data-bound",
    "optimizer": "optimizer-bound",
    "host": "bound by the CPU",
}
"""What a run is called if the part takes BOUND_SHARE of its steps."""

WORK_OF_PART = {
    "matmul": "matrix kernels",
    "other_kernels": "other kernels",
    "launch_idle": "launching kernels",
    "data_wait": "waiting for its data",
    "optimizer": "the optimizer",
    "host": "work of its CPU",
}
"""What a slow rank spends its time on."""


def largest_overhead(shares: Mapping[str, float]) -> tuple[str, float]:
    """Return the largest part other than the kernels, and its share."""
    name = max(OVERHEADS, key=lambda name: shares[name])
    return name, shares[name]


def describe_compute(share: float, shares: Mapping[str, float]) -> str:
    """Return what the kernels take, and the largest other parts: one if the run is compute-bound, else two.

    Args:
        share: Share of the kernels.
        shares: Share of each part.
    """
    kernels = f"matrix kernels take {shares['matmul']:.0%} and other kernels {shares['other_kernels']:.0%} of the step"
    if share >= COMPUTE_BOUND_SHARE:
        largest, lost = largest_overhead(shares)
        named = f" The largest other part is {_part_share(largest, shares)}." if lost >= NAMED_SHARE else ""
        return f"Compute-bound: {kernels}.{named}"
    first, second = sorted(OVERHEADS, key=lambda name: -shares[name])[:2]
    return f"No bottleneck: {kernels}, {_part_share(first, shares)} and {_part_share(second, shares)}."


def describe_bottleneck(bottleneck: str, share: float, profile: StepProfile) -> str:
    """Return what the bottleneck is, and its share of the step."""
    description = _description(bottleneck, share, profile)
    if bottleneck == "host" and not profile.on_gpu:  # All of the training is work of the CPU.
        return f"{description[0].upper()}{description[1:]}."
    return _sentence(bottleneck, share, description)


def describe_ranks_ahead(share: float, profile: StepProfile) -> str:
    """Return that the slowest rank is launch-bound, as the others are.

    Args:
        share: Share of the step in which the GPU of the slowest rank is idle.
        profile: The profile.
    """
    return _sentence(
        "launch_idle",
        share,
        f"the GPU of rank {profile.slowest.rank} is idle for {share:.0%} of the step, because the CPU launches "
        f"{_launches(profile)} too slowly. The other ranks are as slow, but ahead: their GPUs wait in collectives",
    )


def describe_missing_cores(profile: StepProfile) -> str:
    """Return that other programs or threads used the cores, if this is much of the step; empty if it is not."""
    share = profile.without_core_share
    if share is None or share < NOTED_WAIT_FOR_CORES:
        return ""
    return (
        f"For {share:.0%} of the step the ranks had to wait for a free CPU core. This waiting is part of every time in "
        "the table. Profile again when no other program runs."
    )


def _sentence(bottleneck: str, share: float, description: str) -> str:
    text = f"{BOUND[bottleneck]}: {description}" if share >= BOUND_SHARE else description
    return text[0].upper() + text[1:] + "."


def _part_share(name: str, shares: Mapping[str, float]) -> str:
    return f"{PARTS[name]} {shares[name]:.1%}"


def _description(bottleneck: str, share: float, profile: StepProfile) -> str:
    """Return what a bottleneck is, without the period."""
    match bottleneck:
        case "launch_idle":
            launches = _launches(profile)
            return f"the GPU is idle for {share:.0%} of the step, because the CPU launches {launches} too slowly"
        case "waiting":
            return _waiting(share, profile)
        case "exposed_communication":
            collective = _largest_collective(profile)
            return f"communication that no computation hides takes {share:.0%} of the step{collective}"
        case "data_wait":
            loaders = profile.number("dataset.num_workers", 0)
            return f"the training waits for its data for {share:.0%} of the step, with dataset.num_workers={loaders}"
        case "optimizer":
            return f"clipping and the update of the weights take {share:.0%} of the step"
        case _:
            return _host_work(share, profile)


def _host_work(share: float, profile: StepProfile) -> str:
    if profile.on_gpu:
        return f"the CPU does other work than launching kernels for {share:.0%} of the step"
    return f"the CPU spends {share:.0%} of the step outside of operators and collectives, for example in Python"


def _launches(profile: StepProfile) -> str:
    launches = max((rank.launches or 0.0) for rank in profile.ranks)
    steps = profile.number("train.gradient_accumulation_steps", 1)
    return f"{round(launches / steps):,} kernels per micro-batch" if launches else "kernels"


def _waiting(share: float, profile: StepProfile) -> str:
    if not is_one_rank_slow(profile):
        return f"ranks wait for each other for {share:.0%} of the step, and no single rank is the cause"
    if had_no_core(profile):
        return (
            f"the ranks wait for rank {profile.slowest.rank} for {share:.0%} of the step, because it waited "
            f"{without_core_excess_ms(profile):,.1f} ms longer for a free CPU core than the others: other programs may "
            "have used it"
        )
    return (
        f"the ranks wait for rank {profile.slowest.rank} for {share:.0%} of the step, because it spends "
        f"{describe_excess(profile)} more than the others on {WORK_OF_PART[slow_part(profile).part]}"
    )


def _largest_collective(profile: StepProfile) -> str:
    """Return the end of a sentence that names the collective with the largest share; empty if it is unknown."""
    known = profile.collective_shares()
    if not known:
        return ""
    largest = max(known, key=lambda kind: known[kind])
    return f", most of it {largest}" if len(known) > 1 else f", in {largest}"

"""Overrides that change the micro-batch, the accumulation or the global batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from distexp.config.size_checks import check_samples_per_rank
from distexp.data.sample_sizes import GENERATED_TRAIN_SIZES
from distexp.explain.memory_headroom import fits
from distexp.explain.step_profile import StepProfile

BATCH_LIMITS = ("scale.micro_batch_size", "scale.gradient_accumulation_steps")
"""Keys of a scale that lower the values of a command."""
MAX_FACTOR = 8
"""Largest factor of a proposed micro-batch."""


def larger_micro_batch(profile: StepProfile, needed: float) -> Iterator[str]:
    """Yield a micro-batch that is larger by the needed factor, or by the largest factor that fits; none if none fits.

    If the accumulation can shrink by that factor, the global batch stays the same, and so does the training. If it
    cannot, the global batch grows too, which changes the training.
    """
    micro_batch = profile.number("train.micro_batch_size", 1)
    accumulation = profile.number("train.gradient_accumulation_steps", 1)
    wanted = min(MAX_FACTOR, 2 ** max(1, math.ceil(math.log2(needed))))
    possible = [factor for factor in (8, 4, 2) if factor <= wanted and _has_samples(profile, factor)]
    fitting = [factor for factor in possible if fits(profile, batch_factor=factor)]
    same_training = next((factor for factor in fitting if accumulation % factor == 0), None)
    if same_training is not None:
        less = (
            "" if _sets_global_batch(profile) else f" train.gradient_accumulation_steps={accumulation // same_training}"
        )
        yield _lift_limits(profile, f"train.micro_batch_size={micro_batch * same_training}{less}")
    elif fitting and _has_steps(profile, fitting[0]):
        total = profile.number("train.global_batch_size", 1) * fitting[0]
        more = f" train.global_batch_size={total}" if _sets_global_batch(profile) else ""
        yield _lift_limits(profile, f"train.micro_batch_size={micro_batch * fitting[0]}{more}")


def more_accumulation(profile: StepProfile) -> Iterator[str]:
    """Yield twice the global batch, with the same micro-batch, if an epoch has enough steps."""
    if not _has_steps(profile, 2) or profile.setting("ddp.static_graph"):  # It needs one micro-batch per step.
        return
    total = profile.setting("train.global_batch_size")
    if isinstance(total, int):
        yield _lift_limits(profile, f"train.global_batch_size={2 * total}")
    else:
        twice = 2 * profile.number("train.gradient_accumulation_steps", 1)
        yield _lift_limits(profile, f"train.gradient_accumulation_steps={twice}")


def _lift_limits(profile: StepProfile, alternative: str) -> str:
    """Add what makes an alternative effective in a run of ``scale=tiny``, which limits the size of batches.

    Without the limits, a size that the alternative does not set would be larger than in the run. So it is set.
    """
    limits = [key for key in BATCH_LIMITS if profile.setting(key) is not None]
    if not limits:
        return alternative
    kept = [f"{key}={value}" for key, value in _batch_sizes(profile) if f"{key}=" not in alternative]
    return " ".join([alternative, *kept, *(f"{key}=null" for key in limits)])


def _batch_sizes(profile: StepProfile) -> Iterator[tuple[str, int]]:
    """Yield the sizes of the run: the micro-batch, and the global batch or the accumulation."""
    yield "train.micro_batch_size", profile.number("train.micro_batch_size", 1)
    key = "train.global_batch_size" if _sets_global_batch(profile) else "train.gradient_accumulation_steps"
    yield key, profile.number(key, 1)


def _sets_global_batch(profile: StepProfile) -> bool:
    """Return whether the run sets the global batch. Then the accumulation follows from it and the micro-batch."""
    return profile.setting("train.global_batch_size") is not None


def _has_steps(profile: StepProfile, factor: int) -> bool:
    """Return whether an epoch has enough steps for a global batch that is larger by a factor."""
    return (profile.record.metrics.steps_per_epoch or factor) >= factor


def _has_samples(profile: StepProfile, factor: int) -> bool:
    """Return whether each worker has the samples of a micro-batch that is larger by a factor.

    If their number is unknown, only those of the full steps of an epoch are certain.
    """
    known = profile.setting("dataset.train_size") or GENERATED_TRAIN_SIZES.get(profile.setting("dataset._target_"))
    samples = None if profile.setting("dataset.packing") else known  # a row has several samples
    if samples is not None:
        micro_batch = factor * profile.number("train.micro_batch_size", 1)
        return check_samples_per_rank(samples, profile.world_size, micro_batch) is None
    steps = profile.record.metrics.steps_per_epoch
    return steps is None or factor <= max(1, steps - 1) * profile.number("train.gradient_accumulation_steps", 1)


def larger_global_batches(profile: StepProfile, alternatives: Sequence[str]) -> list[str]:
    """Return the alternatives that make the global batch larger, and so change the training."""
    return [alternative for alternative in alternatives if _is_larger(profile, alternative)]


def _is_larger(profile: StepProfile, alternative: str) -> bool:
    values = dict(override.split("=", 1) for override in alternative.split())
    if _sets_global_batch(profile):
        same = profile.setting("train.global_batch_size")
        return bool(int(values.get("train.global_batch_size", same)) > same)
    keys = "train.micro_batch_size", "train.gradient_accumulation_steps"
    before = [profile.number(key, 1) for key in keys]
    after = [int(values.get(key, value)) for key, value in zip(keys, before, strict=True)]
    return math.prod(after) > math.prod(before)

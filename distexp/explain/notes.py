"""The lines below the tables of ``distexp explain``: overrides to try, and what limits the meaning of a profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distexp.explain.explanation import Explanation
from distexp.explain.profile_comparison import ProfileComparison
from distexp.explain.sentences import describe_missing_cores
from distexp.explain.step_profile import StepProfile
from distexp.runs.listing import format_count

LARGE_OVERHEAD = 0.05
"""Difference of the profiled step from the median one, as a share of it, that is worth a note."""

CPU_NOTE = "Without a GPU, operators of PyTorch count as kernels, and slow launches are unknown."


def try_line(alternatives: Sequence[str]) -> str | None:
    """Return the line with the overrides to try; None if there are none."""
    return f"try: {'  or  '.join(alternatives)}" if alternatives else None


def reason_lines(explanation: Explanation) -> Iterator[str]:
    """Yield why each alternative would help, with its first override."""
    reasons = ((overrides.split()[0], explanation.reasons.get(overrides)) for overrides in explanation.alternatives)
    yield from (f"  {override}: {reason}" for override, reason in reasons if reason)


def batch_line(larger: Sequence[str]) -> str | None:
    """Return the line about overrides that make the global batch larger; None if there are none."""
    return f"A larger global batch changes the training: {', '.join(larger)}." if larger else None


def profile_notes(profile: StepProfile) -> Iterator[str]:
    """Yield what limits the meaning of a profile."""
    if profile.on_gpu and profile.overhead_ms > LARGE_OVERHEAD * profile.step_ms:
        yield (
            f"The profiler made the step {profile.overhead_ms / profile.step_ms:.0%} longer. This is left out of "
            "slow launches, host work and waiting, in proportion to their size, and then of the data wait."
        )
    if profile.includes_overhead and profile.on_gpu:
        yield "The parts include the overhead of the profiler, because the batches have different sizes."
    if median := profile.different_median_ms:
        yield (
            f"The parts add up to {profile.step_ms:,.1f} ms. The median of the steps that were not profiled is "
            f"{median:,.1f} ms."
        )
    if not profile.on_gpu:
        yield CPU_NOTE


def scaling_note(profile: StepProfile, *, has_percentages: bool) -> Iterator[str]:
    """Yield that the times of a profile on CPUs are scaled, if this changes them much.

    Args:
        profile: The profile.
        has_percentages: Whether the table above the note has a column with percentages.
    """
    difference = profile.overhead_ms / profile.step_ms
    if profile.on_gpu or abs(difference) <= LARGE_OVERHEAD:
        return
    percentages = " The percentages are those of the profiled step." if has_percentages else ""
    yield (
        f"The profiled step took {profile.profiled_ms:,.1f} ms, {abs(difference):.0%} "
        f"{'more' if difference > 0 else 'less'} than the median of the other steps.{percentages} The times are scaled "
        "to that median."
    )


def comparison_notes(comparison: ProfileComparison) -> Iterator[str]:
    """Yield what limits the meaning of two profiles: of both, then of one of them, then what both have."""
    of_a, of_b = (list(_notes_in_comparison(profile)) for profile in (comparison.a, comparison.b))
    yield from _global_batches(comparison)
    yield from (f"A: {note}" for note in of_a if note not in of_b)
    yield from (f"B: {note}" for note in of_b if note not in of_a)
    yield from (note for note in of_a if note in of_b)


def _notes_in_comparison(profile: StepProfile) -> Iterator[str]:
    """Yield the notes on a run, with the wait for CPU cores, which its own explanation has in the sentence."""
    if waiting := describe_missing_cores(profile):
        yield waiting
    yield from profile_notes(profile)
    yield from scaling_note(profile, has_percentages=False)


def _global_batches(comparison: ProfileComparison) -> Iterator[str]:
    a, b = comparison.a.global_batch, comparison.b.global_batch
    if a != b:
        unit = "row" if comparison.a.setting("dataset.packing") else "sample"
        yield f"A step has {format_count(a, unit)} in A and {b:,} in B, so these are different trainings."

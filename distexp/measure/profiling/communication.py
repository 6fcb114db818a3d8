"""Share of communication in training steps, computed from the intervals of collectives and kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from distexp.measure.profiling.intervals import Interval, clip, intersection_length, merge, total_length
from distexp.measure.profiling.profile_window import ProfileWindow


@dataclass(frozen=True)
class Timeline:
    """Activity of one rank during some steps; all times are in seconds of the same clock."""

    steps: int
    window: Interval  # from the start of the first step to the end of the last
    collectives: Mapping[str, Sequence[Interval]]  # by kind: all_reduce, all_gather, ...
    kernels: Sequence[Interval] | None  # compute kernels on the GPU; None on the CPU


@dataclass(frozen=True)
class CommunicationShares:
    """Communication of one rank."""

    step_s: float  # duration of a profiled step
    share: float  # of that time with at least one collective running or waiting, 0 to 1
    exposed_share: float | None  # the part without any compute kernel; None on the CPU
    by_collective: dict[str, float]  # seconds per step; overlapping kinds count in each


def communication_shares(timeline: Timeline) -> CommunicationShares:
    """Return the share of its steps that a rank spent on communication.

    Raises:
        ValueError: There is no step, or the steps have no duration.
    """
    start, end = timeline.window
    if timeline.steps < 1 or end <= start:
        raise ValueError(f"no duration to compute a share of: {timeline.steps} steps from {start} s to {end} s")
    kinds = {kind: merge(clip(intervals, timeline.window)) for kind, intervals in timeline.collectives.items()}
    running = merge(interval for intervals in kinds.values() for interval in intervals)
    exposed = None
    if timeline.kernels is not None:
        exposed = total_length(running) - intersection_length(running, merge(clip(timeline.kernels, timeline.window)))
    return CommunicationShares(
        step_s=(end - start) / timeline.steps,
        share=total_length(running) / (end - start),
        exposed_share=None if exposed is None else max(0.0, exposed) / (end - start),
        by_collective={
            kind: total_length(intervals) / timeline.steps for kind, intervals in sorted(kinds.items()) if intervals
        },
    )


def combine_shares(ranks: Sequence[CommunicationShares | str], window: ProfileWindow | None) -> dict[str, Any]:
    """Combine the shares of all ranks; if any rank has none, the values are None and a note gives the reason.

    ``first_step``, counted from 1, is the profiler's warm-up: the first step that counts in no other metric.
    """
    known = [result for result in ranks if isinstance(result, CommunicationShares)]
    errors = list(dict.fromkeys(result for result in ranks if isinstance(result, str)))
    entry: dict[str, Any] = {
        "share": None,
        "exposed_share": None,
        "profiled_steps": window.steps if window else 0,
        "first_step": window.steps_before + 1 if window else None,
        "step_s": None,
        "by_collective": {},
        "ranks": [],
        "note": "; ".join(errors) or None,
    }
    if errors:
        return entry
    exposed = [shares.exposed_share for shares in known if shares.exposed_share is not None]
    kinds = sorted({kind for shares in known for kind in shares.by_collective})
    return entry | {
        "share": fmean(shares.share for shares in known),
        "exposed_share": fmean(exposed) if exposed else None,
        "step_s": fmean(shares.step_s for shares in known),
        "by_collective": {kind: fmean(shares.by_collective.get(kind, 0.0) for shares in known) for kind in kinds},
        "ranks": [
            {"rank": rank, "share": shares.share, "exposed_share": shares.exposed_share}
            for rank, shares in enumerate(known)
        ],
    }

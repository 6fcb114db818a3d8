"""What the ranks need to know of each other's traces to find the parts of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distexp.measure.profiling.breakdown import StepParts, split_step, step_windows
from distexp.measure.profiling.chrome_trace import Trace, timeline_of
from distexp.measure.profiling.collective_waits import Durations, Transfer, durations_of, split_collectives
from distexp.measure.profiling.communication import CommunicationShares, communication_shares
from distexp.system.torch_internals.process_groups import has_several_groups


@dataclass(frozen=True)
class RankSummary:
    """What the other ranks need to know of the trace of a rank."""

    shares: CommunicationShares
    step_s: list[float]  # duration of each profiled step
    collectives: Durations

    @classmethod
    def of(cls, trace: Trace) -> RankSummary:
        """Return the summary of a trace."""
        durations = [end - start for start, end in step_windows(trace)]
        collectives = durations_of(trace.collectives, several_groups=has_several_groups())
        return cls(communication_shares(timeline_of(trace)), durations, collectives)


@dataclass(frozen=True)
class MedianStep:
    """The profiled step of a rank whose duration is the median, as a mean over the ranks.

    Attributes:
        position: Number of the step in the trace, the same for all ranks.
        transfers: Collectives of the trace, with the waiting for other ranks.
        parts: Parts of the step.
    """

    position: int
    transfers: list[Transfer]
    parts: StepParts

    @classmethod
    def of(cls, trace: Trace, ranks: Sequence[RankSummary]) -> MedianStep:
        """Return the median step of a rank.

        Args:
            trace: Events of the rank.
            ranks: Summaries of all ranks.

        Raises:
            ValueError: the ranks have different numbers of steps.
        """
        position = _median_position([rank.step_s for rank in ranks])
        transfers = split_collectives(trace.collectives, [rank.collectives for rank in ranks])
        return cls(position, transfers, split_step(trace, step_windows(trace)[position], transfers))


def _median_position(ranks: Sequence[Sequence[float]]) -> int:
    if len({len(rank) for rank in ranks}) > 1:
        raise ValueError("the ranks have different numbers of profiled steps")
    totals = [sum(durations) for durations in zip(*ranks, strict=True)]
    return sorted(range(len(totals)), key=lambda position: totals[position])[(len(totals) - 1) // 2]

"""What the time of the profiled steps went to, from the traces of all ranks.

Each rank reads its own trace. Only durations of collectives and the results travel between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from distexp.distributed.context import Context
from distexp.distributed.process_group import gather_to_all
from distexp.measure.profiling.chrome_trace import Trace
from distexp.measure.profiling.communication import combine_shares
from distexp.measure.profiling.core_waits import CoreWaits
from distexp.measure.profiling.cpu_waits import cpu_busy_ms
from distexp.measure.profiling.lanes import lanes_of
from distexp.measure.profiling.model_sizes import read_model_sizes
from distexp.measure.profiling.profile_window import ProfileWindow
from distexp.measure.profiling.rank_summary import MedianStep, RankSummary
from distexp.measure.profiling.step_segments import ProfiledStep, items_of
from distexp.runs.full_disk import print_despite_full_disk
from distexp.runs.profile_summary import write_profile_summary
from distexp.runs.step_model import StepModel, write_step_model

T = TypeVar("T")


@dataclass(frozen=True)
class ProfileResult:
    """Results of the profiled steps, the same on all ranks.

    Attributes:
        communication: ``metrics.communication`` of the record.
        breakdown: ``metrics.step_breakdown`` of the record; None if a rank has no usable trace.
    """

    communication: dict[str, Any]
    breakdown: list[dict[str, Any]] | None


@dataclass(frozen=True)
class StepAnalysis:
    """Analysis of the profiled steps of one rank.

    Attributes:
        window: The profiled steps; None if no step could be profiled.
        module: The distributed model, whose sizes a forecast needs.
        micro_batches: Micro-batches of a step.
        core_waits: Time without a core in each profiled step.
    """

    context: Context
    window: ProfileWindow | None
    module: nn.Module | None
    micro_batches: int
    core_waits: CoreWaits

    def run(self, trace: Trace | str) -> ProfileResult:
        """Return the communication and the parts of the median step of all ranks. A collective.

        Rank 0 writes the lanes of all ranks, and its own step for a forecast, into the run directory.

        Args:
            trace: Events of this rank, or why there are none.
        """
        ranks = gather_to_all(trace if isinstance(trace, str) else result_or_error(lambda: RankSummary.of(trace)))
        communication = combine_shares([rank if isinstance(rank, str) else rank.shares for rank in ranks], self.window)
        known = [summary for summary in ranks if isinstance(summary, RankSummary)]
        if isinstance(trace, str) or len(known) < len(ranks):
            return ProfileResult(communication, None)
        return ProfileResult(communication, self._break_down(trace, known))

    def _break_down(self, trace: Trace, ranks: Sequence[RankSummary]) -> list[dict[str, Any]] | None:
        """Return the parts of the median step of each rank; None if a rank has none. A collective."""
        median = result_or_error(lambda: MedianStep.of(trace, ranks))
        found = gather_to_all(
            median if isinstance(median, str) else result_or_error(lambda: self._own_parts(trace, median))
        )
        errors = list(dict.fromkeys(result for result in found if isinstance(result, str)))
        known = [result for result in found if not isinstance(result, str)]
        if self.context.rank == 0:
            if errors or isinstance(median, str):
                print_despite_full_disk(f"note: the parts of the profiled step are unknown: {'; '.join(errors)}")
            else:
                self._write_step_model(trace, median, ranks)
                self._write_lanes([lanes for _, lanes in known], len(trace.steps))
        return None if errors else [entry for entry, _ in known]

    def _own_parts(self, trace: Trace, median: MedianStep) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the parts of the median step of this rank, and its lanes."""
        rank = self.context.rank
        entry = {
            **median.parts.to_json(rank, on_gpu=trace.on_gpu),
            "cpu_busy_ms": cpu_busy_ms(trace, median.position),
            "without_core_ms": self.core_waits.milliseconds(median.position),
        }
        return entry, lanes_of(trace, median.parts, median.transfers, rank)

    def _write_step_model(self, trace: Trace, median: MedianStep, ranks: Sequence[RankSummary]) -> None:
        """Write the median step of this rank for a forecast. The training is finished, so an error is only printed."""
        error = result_or_error(lambda: write_step_model(self.context.run_dir, self._step_model(trace, median, ranks)))
        if error is not None:
            print_despite_full_disk(f"note: no forecast is possible from this run: {error}")

    def _step_model(self, trace: Trace, median: MedianStep, ranks: Sequence[RankSummary]) -> StepModel:
        sizes, context = read_model_sizes(self.module), self.context
        step = ProfiledStep(trace, median, context.world_size, self.micro_batches, sizes.fsdp)
        return StepModel(
            on_gpu=trace.on_gpu,
            workers=context.world_size,
            nodes=context.nodes,
            micro_batches=self.micro_batches,
            step_s=median.parts.duration,
            step_s_by_rank=tuple(tuple(rank.step_s) for rank in ranks),
            items=items_of(step),
            units=sizes.units,
            bucket_elements=sizes.buckets,
            group_elements=sizes.groups,
            modules=sizes.modules,
        )

    def _write_lanes(self, lanes: Sequence[dict[str, Any]], steps: int) -> None:
        try:
            write_profile_summary(self.context.run_dir, lanes, steps)
        except OSError as error:
            print_despite_full_disk(f"note: the report has no timeline of this run, which cannot be written: {error}")


def result_or_error(measure: Callable[[], T]) -> T | str:
    """Return a result, or the error as text.

    An exception of one rank would leave the other ranks in the next collective, and the training is finished.
    """
    try:
        return measure()
    except Exception as error:
        return str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"

"""Profiling of the last steps of a training, to measure what their time goes to.

Profiled steps count in no other metric. Every rank profiles, because a rank that profiles alone would be slower than
the others. Each rank reads its own trace. Only durations of collectives and the results travel between ranks.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from distexp.config import TrainConfig
from distexp.distributed.context import Context
from distexp.distributed.process_group import gather_to_all
from distexp.measure.clock import synchronize
from distexp.measure.profiling.annotations import activate_annotations
from distexp.measure.profiling.breakdown import split_step, step_windows
from distexp.measure.profiling.chrome_trace import Trace, read_trace, timeline_of
from distexp.measure.profiling.collective_waits import Durations, durations_of, split_collectives
from distexp.measure.profiling.communication import CommunicationShares, communication_shares
from distexp.measure.profiling.cpu_waits import cpu_busy_ms
from distexp.measure.profiling.lanes import lanes_of
from distexp.measure.profiling.model_sizes import read_model_sizes
from distexp.measure.profiling.step_segments import ProfiledStep, items_of
from distexp.runs.full_disk import print_despite_full_disk
from distexp.runs.profile_summary import write_profile_summary
from distexp.runs.run_dir import profile_trace_path
from distexp.runs.step_model import StepModel, write_step_model
from distexp.system.torch_internals.process_groups import has_several_groups

T = TypeVar("T")

LOG_LEVEL_SILENT = "100"
"""Log level above all messages of the profiler, which logs each start and warns that a CPU is not a GPU."""

WARMUP_STEPS = 1
"""Steps before the profiled ones; they contain the start-up cost of the profiler."""


@dataclass(frozen=True)
class ProfileWindow:
    """The steps that are profiled: the last ones of a training, after the profiler's warm-up."""

    steps_before: int  # steps before the profiler's warm-up
    steps: int

    @classmethod
    def of(cls, train: TrainConfig, *, total: int, per_epoch: int, done: int) -> ProfileWindow | None:
        """Return the window, or None if no step can be profiled.

        The window has ``train.profile_steps`` steps, or fewer: At least half of the steps after
        ``measure_after_step`` remain unprofiled, and no evaluation is between two profiled steps.

        Args:
            train: Training options.
            total: Steps of the training.
            per_epoch: Steps per epoch.
            done: Steps already done when this process resumed.
        """
        measurable = total - done - train.measure_after_step
        in_last_epoch = total - (total - 1) // per_epoch * per_epoch
        steps = min(train.profile_steps, measurable // 2 - WARMUP_STEPS, in_last_epoch - WARMUP_STEPS - 1)
        return cls(total - steps - WARMUP_STEPS, steps) if steps >= 1 else None


@dataclass(frozen=True)
class RankSummary:
    """What the other ranks need to know of the trace of a rank."""

    shares: CommunicationShares
    step_s: list[float]  # duration of each profiled step
    collectives: Durations


@dataclass(frozen=True)
class ProfileResult:
    """Results of the profiled steps, the same on all ranks.

    Attributes:
        communication: ``metrics.communication`` of the record.
        breakdown: ``metrics.step_breakdown`` of the record; None if a rank has no usable trace.
    """

    communication: dict[str, Any]
    breakdown: list[dict[str, Any]] | None


class StepProfiler:
    """Profiler of one training on one rank; it does nothing if ``train.profile_steps`` is 0."""

    def __init__(self, context: Context, requested_steps: int) -> None:
        self.context, self.requested_steps = context, requested_steps
        self.window: ProfileWindow | None = None
        self.done = 0  # steps since the profiler started, including its warm-up
        self.overhead_s = 0.0  # of starting and stopping the profiler; not part of the training time
        self.invalid: str | None = None  # why the profiled steps cannot be used
        self.module: nn.Module | None = None  # the distributed model, whose sizes a forecast needs
        self.micro_batches = 1  # of a step
        self._profile: profile | None = None
        self._finished = False

    @property
    def running(self) -> bool:
        """Return whether the profiler is running; such steps count in no other metric."""
        return self._profile is not None and not self._finished

    @property
    def has_started(self) -> bool:
        """Return whether the profiler has started; it may have finished."""
        return self._profile is not None

    def start(self) -> None:
        """Start the profiler; the next step is its warm-up."""
        assert self.window is not None
        on_gpu = self.context.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        os.environ.setdefault("KINETO_LOG_LEVEL", LOG_LEVEL_SILENT)
        synchronize(self.context.device)
        before = time.perf_counter()
        steps = schedule(wait=0, warmup=WARMUP_STEPS, active=self.window.steps, repeat=1)
        self._profile = profile(activities=activities, schedule=steps)
        activate_annotations(active=True)
        self._profile.start()
        self.overhead_s += time.perf_counter() - before

    def step(self) -> None:
        """Mark the end of a step; synchronize after the warm-up and after the last step to keep them separate."""
        if self._profile is None or self.window is None or self._finished:
            return
        self.done += 1
        if self.done in (WARMUP_STEPS, WARMUP_STEPS + self.window.steps):
            synchronize(self.context.device)
        before = time.perf_counter()
        self._profile.step()
        if self.done == WARMUP_STEPS + self.window.steps:
            self._finished = True
            self._stop()
        self.overhead_s += time.perf_counter() - before

    def mark_interrupted(self, reason: str) -> None:
        """Discard the measurement if other work, such as a checkpoint, happens between profiled steps."""
        if self.running and self.done >= WARMUP_STEPS:
            self.invalid = f"{reason} between the profiled steps: not measured"

    def _stop(self) -> None:
        assert self._profile is not None
        self._profile.stop()
        activate_annotations(active=False)

    def finish(self) -> ProfileResult | None:
        """Return what the time of the profiled steps went to. A collective.

        Rank 0 saves its trace and the lanes of all ranks in the run directory.

        Returns:
            The result, or None if ``train.profile_steps`` is 0.
        """
        if not self.requested_steps:
            return None
        trace = _result_or_error(self._read_trace)
        ranks = gather_to_all(_result_or_error(lambda: _summarize(trace)))
        communication = _combine([rank if isinstance(rank, str) else rank.shares for rank in ranks], self.window)
        known = [summary for summary in ranks if isinstance(summary, RankSummary)]
        if isinstance(trace, str) or len(known) < len(ranks):
            return ProfileResult(communication, None)
        return ProfileResult(communication, self._break_down(trace, known))

    def _break_down(self, trace: Trace, ranks: Sequence[RankSummary]) -> list[dict[str, Any]] | None:
        """Return the parts of the median step of each rank, and write its lanes on rank 0. A collective.

        Returns:
            The parts, or None if a rank has none. Rank 0 then prints the reason.
        """
        found = gather_to_all(_result_or_error(lambda: self._own_parts(trace, ranks)))
        errors = list(dict.fromkeys(result for result in found if isinstance(result, str)))
        if self.context.rank == 0 and not errors:
            self._write_step_model(trace, ranks)
        known = [result for result in found if not isinstance(result, str)]
        if self.context.rank == 0 and errors:
            print_despite_full_disk(f"note: the parts of the profiled step are unknown: {'; '.join(errors)}")
        elif self.context.rank == 0:
            self._write_lanes([lanes for _, lanes in known], len(trace.steps))
        return None if errors else [entry for entry, _ in known]

    def _own_parts(self, trace: Trace, ranks: Sequence[RankSummary]) -> tuple[dict[str, Any], dict[str, Any]] | str:
        """Return the parts of the median step of this rank and its lanes, or why there are none."""
        position = _median_step([summary.step_s for summary in ranks])
        if position is None:
            return "the ranks have different numbers of profiled steps"
        collectives = split_collectives(trace.collectives, [summary.collectives for summary in ranks])
        step = split_step(trace, step_windows(trace)[position], collectives)
        rank = self.context.rank
        entry = step.to_json(rank, on_gpu=trace.on_gpu) | {"cpu_busy_ms": cpu_busy_ms(trace, position)}
        return entry, lanes_of(trace, step, collectives, rank)

    def _write_step_model(self, trace: Trace, ranks: Sequence[RankSummary]) -> None:
        """Write the median step of this rank for a forecast. The training is finished, so an error is only printed."""
        error = _result_or_error(lambda: write_step_model(self.context.run_dir, self._step_model(trace, ranks)))
        if error is not None:
            print_despite_full_disk(f"note: no forecast is possible from this run: {error}")

    def _step_model(self, trace: Trace, ranks: Sequence[RankSummary]) -> StepModel:
        """Return the median step of this rank."""
        times = [rank.step_s for rank in ranks]
        position = _median_step(times)
        if position is None:
            raise ValueError("the ranks have different numbers of profiled steps")
        transfers = split_collectives(trace.collectives, [rank.collectives for rank in ranks])
        parts = split_step(trace, step_windows(trace)[position], transfers)
        sizes = read_model_sizes(self.module)
        context = self.context
        step = ProfiledStep(trace, position, parts, transfers, context.world_size, self.micro_batches, sizes.fsdp)
        return StepModel(
            on_gpu=trace.on_gpu,
            workers=context.world_size,
            nodes=context.nodes,
            micro_batches=self.micro_batches,
            step_s=parts.duration,
            step_s_by_rank=tuple(map(tuple, times)),
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

    def _read_trace(self) -> Trace | str:
        """Return the trace of this rank, or why there is none."""
        if self._profile is not None and not self._finished:  # the training stopped early
            self._stop()
        if self.invalid is not None:
            return self.invalid
        if self.window is None:
            return (
                f"too few steps to measure speed and to profile (train.profile_steps={self.requested_steps}): "
                "train more steps"
            )
        if self._profile is None or not self._finished:
            return "the training stopped before its last steps, which are profiled"
        with tempfile.TemporaryDirectory(prefix="distexp-profile-") as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            self._profile = None  # frees its events
            if self.context.rank == 0:
                _save_compressed(path, profile_trace_path(self.context.run_dir))
            return read_trace(path, on_gpu=self.context.device.type == "cuda")


def _result_or_error(measure: Callable[[], T]) -> T | str:
    """Return a result, or the error as text.

    An exception of one rank would leave the other ranks in the next collective, and the training is finished.
    """
    try:
        return measure()
    except Exception as error:
        return str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"


def _summarize(trace: Trace | str) -> RankSummary | str:
    """Return the summary of a trace, or why there is none."""
    if isinstance(trace, str):
        return trace
    shares = communication_shares(timeline_of(trace))
    durations = [end - start for start, end in step_windows(trace)]
    return RankSummary(shares, durations, durations_of(trace.collectives, several_groups=has_several_groups()))


def _median_step(ranks: Sequence[Sequence[float]]) -> int | None:
    """Return the position of the step with the median duration, as a mean over the ranks; the same for all ranks.

    It is None if the ranks have different numbers of steps.
    """
    if len({len(rank) for rank in ranks}) > 1:
        return None
    means = [_mean(values) for values in zip(*ranks, strict=True)]
    return sorted(range(len(means)), key=lambda position: means[position])[(len(means) - 1) // 2]


def _save_compressed(trace: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    with trace.open("rb") as source, gzip.open(target, "wb", compresslevel=3) as compressed:
        shutil.copyfileobj(source, compressed)


def _combine(ranks: Sequence[CommunicationShares | str], window: ProfileWindow | None) -> dict[str, Any]:
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
        "share": _mean([shares.share for shares in known]),
        "exposed_share": _mean(exposed) if exposed else None,
        "step_s": _mean([shares.step_s for shares in known]),
        "by_collective": {kind: _mean([shares.by_collective.get(kind, 0.0) for shares in known]) for kind in kinds},
        "ranks": [
            {"rank": rank, "share": shares.share, "exposed_share": shares.exposed_share}
            for rank, shares in enumerate(known)
        ],
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

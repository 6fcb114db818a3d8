"""Profiling of the last steps of a training, to measure what their time goes to.

Profiled steps count in no other metric. Every rank profiles, because a rank that profiles alone would be slower than
the others.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import time
from pathlib import Path

from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from distexp.distributed.context import Context
from distexp.measure.clock import synchronize
from distexp.measure.profiling.annotations import activate_annotations
from distexp.measure.profiling.chrome_trace import Trace, read_trace
from distexp.measure.profiling.core_waits import CoreWaits
from distexp.measure.profiling.profile_window import WARMUP_STEPS, ProfileWindow
from distexp.measure.profiling.step_analysis import ProfileResult, StepAnalysis, result_or_error
from distexp.runs.run_dir import profile_trace_path

DETACH = "TEARDOWN_CUPTI"
"""Variable that makes the profiler detach CUPTI from the process when it stops. CUPTI slows down later launches."""

LOG_LEVEL_SILENT = "100"
"""Log level above all messages of the profiler, which logs each start and warns that a CPU is not a GPU."""


class StepProfiler:
    """Profiler of one training on one rank; it does nothing if ``train.profile_steps`` is 0.

    Args:
        context: Rank and device.
        requested_steps: ``train.profile_steps``.
        cuda_graphs: Whether the training runs CUDA graphs. Then CUPTI stays attached, because detaching it may crash.
    """

    def __init__(self, context: Context, requested_steps: int, *, cuda_graphs: bool = False) -> None:
        self.context, self.requested_steps, self.cuda_graphs = context, requested_steps, cuda_graphs
        self.window: ProfileWindow | None = None
        self.done = 0  # steps since the profiler started, including its warm-up
        self.overhead_s = 0.0  # of starting and stopping the profiler; not part of the training time
        self.invalid: str | None = None  # why the profiled steps cannot be used
        self.module: nn.Module | None = None  # the distributed model, whose sizes a forecast needs
        self.micro_batches = 1  # of a step
        self.core_waits = CoreWaits(enabled=context.device.type == "cpu" and requested_steps > 0)
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
        if not self.cuda_graphs:
            os.environ.setdefault(DETACH, "1")
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
        if self.done > WARMUP_STEPS:
            self.core_waits.end_step()
        before = time.perf_counter()
        self._profile.step()
        if self.done == WARMUP_STEPS + self.window.steps:
            self._finished = True
            self._stop()
        self.overhead_s += time.perf_counter() - before
        self.core_waits.start_step()

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
        trace = result_or_error(self._read_trace)
        analysis = StepAnalysis(self.context, self.window, self.module, self.micro_batches, self.core_waits)
        return analysis.run(trace)

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


def _save_compressed(trace: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    with trace.open("rb") as source, gzip.open(target, "wb", compresslevel=3) as compressed:
        shutil.copyfileobj(source, compressed)

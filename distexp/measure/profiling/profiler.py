"""Profiling of the last steps of a training, to measure what their time goes to. They count in no other metric.

Every rank profiles, because a rank that profiles alone would be slower than the others.
"""

from __future__ import annotations

import gzip
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from distexp.config import TrainConfig
from distexp.distributed.context import Context
from distexp.distributed.process_group import gather_to_all
from distexp.measure import clock, watcher
from distexp.measure.profiling import chrome_trace, phases, step_analysis
from distexp.measure.profiling.breakdown import remove_overhead
from distexp.measure.profiling.intervals import WARMUP_STEPS, ProfileWindow
from distexp.runs.run_dir import PROFILE_TRACE
from distexp.strategies.optimizer import ReadTensors
from distexp.system.torch_internals.annotations import activate_annotations

DETACH = "TEARDOWN_CUPTI"  # Detach CUPTI from the process when the profiler stops, because it slows down launches.


class StepProfiler(watcher.Watcher):
    """Profiler of one rank. ``window_of`` returns the steps to profile, given the steps of earlier attempts.

    With CUDA graphs CUPTI stays attached, because detaching it may crash.
    """

    section = "metrics"

    def __init__(
        self, context: Context, train: TrainConfig, window_of: Callable[[int], ProfileWindow | None] = lambda _: None
    ) -> None:
        self.context, self.train, self.window_of = context, train, window_of
        self.window: ProfileWindow | None = None
        self.done = 0  # steps since the profiler started, including its warm-up
        self.invalid: str | None = None  # why the profiled steps cannot be used
        self.module: nn.Module | None = None  # the distributed model, whose sizes a forecast needs
        self.breakdown: list[dict[str, Any]] | None = None  # of each rank, with the overhead of the profiler
        self.core_waits = phases.CoreWaits(enabled=context.device.type == "cpu" and train.profile_steps > 0)
        self._profile: profile | None = None
        self._finished = False

    @property
    def running(self) -> bool:
        """Return whether the profiler is running; such steps count in no other metric."""
        return self._profile is not None and not self._finished

    def follow(self, module: nn.Module, read: ReadTensors) -> None:
        """Keep the model."""
        self.module = module

    def start(self, done: int) -> None:
        """Choose the steps to profile."""
        self.window = self.window_of(done)

    def start_steps(self, phase: str) -> None:
        """Start the profiler if its phase starts. If it runs, discard the measurement: other work interrupted it."""
        if phase == watcher.PROFILE and self._profile is None:
            clock.synchronize(self.context.device)
            before = time.perf_counter()
            self._profile = self._start_profile()
            self.overhead_s += time.perf_counter() - before
        elif self.running and self.done >= WARMUP_STEPS:
            self.invalid = "a checkpoint was written between the profiled steps: not measured"

    def _start_profile(self) -> profile:
        assert self.window is not None
        on_gpu = self.context.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        # No messages: the profiler logs each start, and warns that a CPU is not a GPU.
        os.environ.setdefault("KINETO_LOG_LEVEL", "100")
        if self.train.compiled != "graphs":
            os.environ.setdefault(DETACH, "1")
        steps = schedule(wait=0, warmup=WARMUP_STEPS, active=self.window.steps, repeat=1)
        started = profile(activities=activities, schedule=steps)
        activate_annotations(active=True)
        started.start()
        return started

    def after_step(self, step: watcher.Step) -> None:
        """Mark the end of a step; synchronize after the warm-up and after the last step to keep them separate."""
        if self._profile is None or self.window is None or self._finished:
            return
        self.done += 1
        if self.done in (WARMUP_STEPS, WARMUP_STEPS + self.window.steps):
            clock.synchronize(self.context.device)
        if self.done > WARMUP_STEPS:
            self.core_waits.end_step()
        before = time.perf_counter()
        self._profile.step()
        if self.done == WARMUP_STEPS + self.window.steps:
            self._finished = True
            self._stop()
        self.overhead_s += time.perf_counter() - before
        self.core_waits.start_step()

    def _stop(self) -> None:
        assert self._profile is not None
        self._profile.stop()
        activate_annotations(active=False)

    def summary(self, steps: watcher.MeasuredSteps) -> dict[str, Any]:
        """Return the communication, and the parts of the median step without the profiler's overhead. A collective."""
        profiled = self.finish()
        if profiled is None:
            return {}
        self.breakdown = breakdown = profiled.breakdown
        if breakdown and steps.durations_s:
            median_s = (clock.quantiles(steps.durations_s) or {})["p50"]
            data_waits_s = gather_to_all(statistics.median(steps.data_waits_s))
            breakdown = [
                remove_overhead(entry, median_s, data_wait_s=wait_s, sizes_differ=steps.sizes_differ)
                for entry, wait_s in zip(breakdown, data_waits_s, strict=True)
            ]
        return {"communication": profiled.communication, "step_breakdown": breakdown}

    def finish(self) -> step_analysis.ProfileResult | None:
        """Return what the time of the profiled steps went to; None if ``train.profile_steps`` is 0. A collective.

        Rank 0 saves its trace and the lanes of all ranks in the run directory.
        """
        if not self.train.profile_steps:
            return None
        micro_batches = self.train.gradient_accumulation_steps
        analysis = step_analysis.StepAnalysis(self.context, self.window, self.module, micro_batches, self.core_waits)
        return analysis.run(step_analysis.result_or_error(self._read_trace))

    def _read_trace(self) -> chrome_trace.Trace | str:
        if self._profile is not None and not self._finished:  # the training stopped early
            self._stop()
        if self.invalid is not None:
            return self.invalid
        if self.window is None:
            requested = f"train.profile_steps={self.train.profile_steps}"
            return f"too few steps to measure speed and to profile ({requested}): train more steps"
        if self._profile is None or not self._finished:
            return "the training stopped before its last steps, which are profiled"
        with tempfile.TemporaryDirectory(prefix="distexp-profile-") as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            self._profile = None  # frees its events
            if self.context.rank == 0:
                target = self.context.run_dir / PROFILE_TRACE
                target.parent.mkdir(exist_ok=True)
                with path.open("rb") as source, gzip.open(target, "wb", compresslevel=3) as compressed:
                    shutil.copyfileobj(source, compressed)
            return chrome_trace.read_trace(path, on_gpu=self.context.device.type == "cuda")

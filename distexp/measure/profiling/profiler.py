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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from distexp.config import TrainConfig
from distexp.distributed.context import Context
from distexp.distributed.process_group import gather_to_all
from distexp.measure import clock, watcher
from distexp.measure.memory.step_recording import count_elements
from distexp.measure.profiling import chrome_trace, phases
from distexp.measure.profiling.breakdown import BUBBLE, NO_STAGES, remove_overhead
from distexp.measure.profiling.chrome_trace import Trace, combine_shares
from distexp.measure.profiling.intervals import MIN_EPOCH_STEPS, WARMUP_STEPS, ProfileWindow
from distexp.measure.profiling.step_segments import MedianStep, ProfiledStep, RankSummary, items_of, lanes_of
from distexp.models.transforms import find_units
from distexp.runs.run_dir import PROFILE_TRACE
from distexp.runs.step_files import Parameters, StepModel, write_profile_summary, write_step_model
from distexp.runs.texts import print_despite_full_disk
from distexp.strategies.optimizer import ReadTensors, parameter_groups
from distexp.system.torch_internals import collectives

DETACH = "TEARDOWN_CUPTI"  # Detach CUPTI from the process when the profiler stops, because it slows down launches.
T = TypeVar("T")


@dataclass(frozen=True)
class ProfileResult:
    """Results of the profiled steps, the same on all ranks."""

    communication: dict[str, Any]  # ``metrics.communication`` of the record
    breakdown: list[dict[str, Any]] | None  # ``metrics.step_breakdown``; None if a rank has no usable trace


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
        collectives.activate_annotations(active=True)
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
        collectives.activate_annotations(active=False)

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

    def finish(self) -> ProfileResult | None:
        """Return what the time of the profiled steps went to; None if ``train.profile_steps`` is 0. A collective.

        Rank 0 saves its trace and the lanes of all ranks in the run directory.
        """
        if not self.train.profile_steps:
            return None
        return self._analyze(result_or_error(self._read_trace))

    def _read_trace(self) -> chrome_trace.Trace | str:
        if self._profile is not None and not self._finished:  # the training stopped early
            self._stop()
        if self.invalid is not None:
            return self.invalid
        if self.window is None:
            requested = f"train.profile_steps={self.train.profile_steps}"
            return (
                f"too few steps to measure speed and to profile ({requested}): train more steps, and at least "
                f"{MIN_EPOCH_STEPS} in the last epoch, which more samples or a smaller global batch make longer"
            )
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

    def _analyze(self, trace: Trace | str) -> ProfileResult:
        """Return the results of all ranks; a collective. Each rank sends only durations and results of its trace."""
        ranks = gather_to_all(trace if isinstance(trace, str) else result_or_error(lambda: RankSummary.of(trace)))
        communication = combine_shares([rank if isinstance(rank, str) else rank.shares for rank in ranks], self.window)
        known = [summary for summary in ranks if isinstance(summary, RankSummary)]
        if isinstance(trace, str) or len(known) < len(ranks):
            return ProfileResult(communication, None)
        return ProfileResult(communication, self._break_down(trace, known))

    def _break_down(self, trace: Trace, ranks: Sequence[RankSummary]) -> list[dict[str, Any]] | None:
        """Return the parts of the median step of each rank; None if a rank has none. A collective."""
        median = result_or_error(lambda: MedianStep.of(trace, ranks, self._stages()))
        own = median if isinstance(median, str) else result_or_error(lambda: self._own_parts(trace, median))
        found = gather_to_all(own)
        errors = list(dict.fromkeys(result for result in found if isinstance(result, str)))
        known = [result for result in found if not isinstance(result, str)]
        if self.context.rank == 0:
            if errors or isinstance(median, str):
                print_despite_full_disk(f"note: the parts of the profiled step are unknown: {'; '.join(errors)}")
            else:
                self._write(trace, median, ranks, [lanes for _, lanes in known])
        return None if errors else [entry for entry, _ in known]

    def _stages(self) -> Mapping[str, str]:
        """Return the parts of communication in a pipeline. Other ranks than its stages also wait for each other."""
        if self.context.stages == 1:
            return NO_STAGES
        is_only = self.context.stages == self.context.world_size
        return BUBBLE if is_only else {**BUBBLE, "waiting": "waiting"}

    def _own_parts(self, trace: Trace, median: MedianStep) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the parts of the median step of this rank, and its lanes."""
        rank = self.context.rank
        entry = {
            **median.parts.to_json(rank, on_gpu=trace.on_gpu),
            "cpu_busy_ms": phases.cpu_busy_ms(trace, median.position),
            "without_core_ms": self.core_waits.milliseconds(median.position),
        }
        return entry, lanes_of(trace, median.parts, median.transfers, rank)

    def _write(
        self, trace: Trace, median: MedianStep, ranks: Sequence[RankSummary], lanes: Sequence[dict[str, Any]]
    ) -> None:
        """Write the own step and the lanes of all ranks. The training is finished, so an error is only printed."""
        folder = self.context.run_dir
        error = result_or_error(lambda: write_step_model(folder, self._step_model(trace, median, ranks)))
        if error is not None:
            print_despite_full_disk(f"note: no forecast is possible from this run: {error}")
        error = result_or_error(lambda: write_profile_summary(folder, lanes, len(trace.steps)))
        if error is not None:
            print_despite_full_disk(f"note: the report has no timeline of this run, which cannot be written: {error}")

    def _step_model(self, trace: Trace, median: MedianStep, ranks: Sequence[RankSummary]) -> StepModel:
        sizes, context = read_model_sizes(self.module), self.context
        micro_batches = self.train.gradient_accumulation_steps
        step = ProfiledStep(trace, median, context.world_size, micro_batches, sizes.fsdp)
        return StepModel(
            on_gpu=trace.on_gpu,
            workers=context.world_size,
            nodes=context.nodes,
            micro_batches=micro_batches,
            step_s=median.parts.duration,
            step_s_by_rank=tuple(tuple(rank.step_s) for rank in ranks),
            items=items_of(step),
            units=sizes.units,
            bucket_elements=sizes.buckets,
            group_elements=sizes.groups,
            modules=sizes.modules,
        )


def result_or_error(measure: Callable[[], T]) -> T | str:
    """Return a result, or the error as text: an exception would leave the other ranks in the next collective."""
    try:
        return measure()
    except Exception as error:
        return str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of what a distributed model sends and updates, for a forecast."""

    units: tuple[Parameters, ...] = ()  # parameters of each block, and between the blocks, in the order of the model
    fsdp: dict[str, collectives.FSDPUnitSize] = field(default_factory=dict)  # units of FSDP by name; empty: no FSDP
    buckets: tuple[int, ...] = ()  # Elements of DDP's buckets. Empty: no DDP.
    groups: tuple[tuple[int, ...], ...] = ()  # elements of each parameter in each group of the optimizer
    modules: tuple[tuple[int, ...], ...] = ()  # positions, in the parameters of all units, of those of each module


def read_model_sizes(module: nn.Module | None) -> ModelSizes:
    """Return the sizes of a distributed model; empty if it is unknown."""
    if module is None:
        return ModelSizes()
    bare = getattr(module, "module", module)
    buckets: tuple[int, ...] = ()
    if isinstance(module, nn.parallel.DistributedDataParallel):
        width = next(parameter.element_size() for parameter in module.parameters() if parameter.requires_grad)
        buckets = tuple(size // width for size in collectives.ddp_bucket_sizes(module))
    return ModelSizes(
        tuple(_units(bare)),
        {unit.name: unit for unit in collectives.read_fsdp_unit_sizes(module)},
        buckets,
        tuple(tuple(map(count_elements, group["params"])) for group in parameter_groups(bare, weight_decay=0.0)),
        tuple(_positions_by_module(bare)),
    )


def _units(model: nn.Module) -> Iterator[Parameters]:
    """Yield the parameters of each block, and of the modules before and after the blocks."""
    blocks = [name for name, _ in find_units(model)]

    def unit(name: str) -> str:
        return next((block for block in blocks if name.startswith(f"{block}.")), name.split(".", maxsplit=1)[0])

    for name, named in groupby(model.named_parameters(), key=lambda named: unit(named[0])):
        members = [parameter for _, parameter in named]
        elements, trained = (
            tuple(count_elements(parameter) for parameter in members if parameter.requires_grad or not only_trained)
            for only_trained in (False, True)
        )
        yield Parameters(name, elements, None if len(trained) == len(elements) else trained)


def _positions_by_module(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """Yield the positions of the parameters of each module that has some. Modules may share a parameter."""
    positions = {id(parameter): position for position, parameter in enumerate(model.parameters())}
    for module in model.modules():
        if found := tuple(positions[id(parameter)] for parameter in module.parameters(recurse=False)):
            yield found

"""The watchers of a training: all measurements that accompany its steps. Add a new one to ``build_watchers``."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from distexp.config import MeasureConfig, custom_code
from distexp.distributed.context import Context
from distexp.exceptions import text_of
from distexp.measure.memory.rank_memory import AllocatorWatch, OutOfMemoryWatch, PartsWatch
from distexp.measure.memory.step_recording import StepRecording, has_history
from distexp.measure.profiling.profiler import StepProfiler
from distexp.measure.rank_times import RankTimesWatch
from distexp.measure.watcher import CompileWatch, ExpertLoadWatch, MeasuredSteps, Watcher
from distexp.runs.metrics import Metrics
from distexp.training.inputs import StepPlan


def build_watchers(plan: StepPlan, measure: MeasureConfig, context: Context) -> list[Watcher]:
    """Return the watchers of a training, in the order in which they are called.

    The recording of the memory ends before the profiler counts its first step, so the parts come before the profiler.
    The slow ranks need what the profiler found, so they come after it.
    """
    train, device = plan.train, context.device
    allocator = AllocatorWatch(device, context.rank)
    profiler = StepProfiler(context, train, plan.profile_window)
    # On a GPU, counting would keep the parameters that ZeRO-3 and FSDP gather until the backward pass.
    counts_activations = device.type == "cpu" and not train.compile
    recording = (lambda: StepRecording(device, allocator.keep_peaks)) if has_history(device) else None
    return [
        OutOfMemoryWatch(device, records_stacks=train.profile_steps > 0 and train.measure_after_step > 1),
        PartsWatch(context.rank, counts_activations=counts_activations, make_recording=recording),
        allocator,
        CompileWatch(enabled=bool(train.compile)),
        ExpertLoadWatch(),
        profiler,
        RankTimesWatch(context, profiler, enabled=measure.slow_ranks),
        *(custom_watcher(target) for target in measure.watchers),
    ]


def custom_watcher(target: str) -> Watcher:
    """Return a watcher of ``measure.watchers``. Raises ConfigError if the target returns something else."""
    kind = custom_code.locate(target)
    with custom_code.shorten_errors(target, "the constructor"):
        watcher: Watcher = kind()
    custom_code.check_returned(watcher, Watcher, f"measure.watchers: {target}")
    return watcher


class Watchers:
    """Sends each event of a training to those watchers that define a method for it, in the order of the list."""

    def __init__(self, members: Sequence[Watcher]) -> None:
        self.members = members
        self.follow, self.start, self.start_steps = map(self._event, ("follow", "start", "start_steps"))
        self.start_forward, self.before_update = map(self._event, ("start_forward", "before_update"))
        self.end_step, self.after_step, self.stop = map(self._event, ("end_step", "after_step", "stop"))

    def _event(self, name: str) -> Callable[..., None]:
        """Return a function that calls a method of the watchers that have their own."""
        base = getattr(Watcher, name)
        calls = [getattr(watcher, name) for watcher in self.members if getattr(type(watcher), name) is not base]

        def send(*arguments: Any) -> None:
            for call in calls:
                call(*arguments)

        return send

    def add_summaries(self, steps: MeasuredSteps, metrics: Metrics, memory: dict[str, Any]) -> Metrics:
        """Add the section of each watcher to the memory, and return the metrics with theirs. A collective."""
        custom: dict[str, Any] = {}
        for watcher in self.members:
            if watcher.section == "metrics":
                metrics = replace(metrics, **watcher.summary(steps))
            elif watcher.section == "memory":
                memory |= watcher.summary(steps)
            else:
                custom |= _custom_summary(watcher, steps)
        return replace(metrics, watchers=custom or None)


def _custom_summary(watcher: Watcher, steps: MeasuredSteps) -> dict[str, Any]:
    """Return the summary of a custom watcher by its name. The training is finished, so an error is only printed."""
    name = f"{type(watcher).__module__}.{type(watcher).__qualname__}"
    try:
        found = dict(watcher.summary(steps))
        json.dumps(found, allow_nan=False)
    except Exception as error:  # any: the code of the user raises it
        print(f"note: {name} has no summary: {type(error).__name__}: {text_of(error)}", flush=True)
        return {}
    return {name: found} if found else {}

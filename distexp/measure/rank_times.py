"""Watcher of the step times of all ranks, of the slow ranks, and of what it costs to watch for them."""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from distexp.distributed.context import Context
from distexp.distributed.process_group import gather_to_all
from distexp.measure import clock, slow_rank_watch
from distexp.measure.profiling.profiler import StepProfiler
from distexp.measure.stragglers import RankTimes, find_stragglers, include_cpu_work, step_times
from distexp.measure.watcher import TRAIN, MeasuredSteps, Step, Watcher
from distexp.runs.step_files import StepTime, write_step_times
from distexp.runs.texts import print_despite_full_disk, write_despite_full_disk
from distexp.strategies.optimizer import ReadTensors

MAX_STEPS = 4096  # the latest ordinary steps that are kept


class RankTimesWatch(Watcher):
    """Step times of the ranks. *Ordinary* steps are measured and follow another measured step directly.

    The other ones follow an evaluation, a checkpoint or the unmeasured first steps, so they are not compared.
    """

    section = "metrics"

    def __init__(self, context: Context, profiler: StepProfiler, *, enabled: bool) -> None:
        self.context, self.profiler = context, profiler
        self.waits = slow_rank_watch.SlowRankWatch(context, enabled=enabled)
        self._ordinary: deque[tuple[int, bool]] = deque(maxlen=MAX_STEPS)  # number of the step, and whether watched
        self._follows_step = self._was_watched = False

    def follow(self, module: nn.Module, read: ReadTensors) -> None:
        """Follow the backward passes."""
        self.waits.follow(module)

    def start_steps(self, phase: str) -> None:
        """Leave out the next step of the ordinary ones, and watch it if it is due."""
        self._follows_step = False
        self.waits.start_step(measured=phase == TRAIN)

    def end_step(self, step: Step) -> None:
        """Keep the waits, before the clock reads the duration: the whole cost of watching is in the watched step."""
        self._was_watched = self.waits.watching
        self.waits.end_step(measured=step.measured)

    def after_step(self, step: Step) -> None:
        """Keep an ordinary step, and watch the next step if it is due."""
        self.waits.start_step(measured=step.next_measured)
        if step.measured:
            if self._follows_step:
                self._ordinary.append((self.waits.steps - 1, self._was_watched))
            self._follows_step = True

    def stop(self) -> None:
        """Restore the methods of torch."""
        self.waits.stop()

    def summary(self, steps: MeasuredSteps) -> Mapping[str, Any]:
        """Return step times and slow ranks, and write the ordinary steps of this rank. A collective."""
        found = {"slow_rank_watch": self.waits.state}
        if not steps.durations_s:
            return found
        ranks = gather_to_all(self._own_times(steps))
        if self.profiler.breakdown:
            ranks = [include_cpu_work(*pair) for pair in zip(ranks, self.profiler.breakdown, strict=True)]
        return found | {"step_times_by_rank": step_times(ranks), "stragglers": find_stragglers(ranks)}

    def _own_times(self, steps: MeasuredSteps) -> RankTimes:
        durations, on_cpu = steps.durations_s, self.context.device.type == "cpu"
        waits = {step: wait_s for step, wait_s in self.waits.waits_s().items() if step < len(durations)}
        known = [(step, watched) for step, watched in self._ordinary if step < len(durations)]
        ordinary = [StepTime(step, durations[step], watched) for step, watched in known]
        if self.waits.enabled:
            rank, folder = self.context.rank, self.context.run_dir
            try:
                write_despite_full_disk(folder, lambda: write_step_times(folder, rank, ordinary))
            except OSError as error:  # The training is finished, so it is only printed.
                print_despite_full_disk(f"note: the step times of rank {rank} cannot be written: {error}")
        return RankTimes(
            self.context.rank,
            clock.quantiles(durations) or {},
            # On a busy machine, a wait may be measured until after the end of its step.
            own_s=[max(0.0, durations[step] - wait_s) for step, wait_s in waits.items()],
            durations_s=[durations[step] for step in waits],
            data_wait_s=[steps.data_waits_s[step] for step in waits],
            without_core_s=[self.waits.without_core_s(step) for step in waits],
            watched_p50_s=_median_s(ordinary, watched=True),
            unwatched_p50_s=_median_s(ordinary, watched=False),
            on_cpu=on_cpu,
            includes_cpu_work=on_cpu,
        )


def _median_s(steps: Sequence[StepTime], *, watched: bool) -> float | None:
    """Return the median duration of the watched or of the other steps; None if there is none."""
    return statistics.median(chosen) if (chosen := [one.seconds for one in steps if one.watched == watched]) else None

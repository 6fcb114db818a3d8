"""What profiling costs the other steps: pairs of runs of the same training, of which one profiles steps in its middle.

A profile has the last steps of a training. Here it has those in the middle, so that steps follow it too.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

from benchmarks.commands import Record, Run
from benchmarks.watching import Shift, estimate_shift
from distexp.config import Config
from distexp.distributed.context import Context
from distexp.engines.native import Native
from distexp.measure.profiling.intervals import WARMUP_STEPS, ProfileWindow
from distexp.runs.record_sections import Built
from distexp.strategies.base import EvaluableModel
from distexp.training.inputs import ModelFactory, TrainingInputs

PAIRS = 12
"""Pairs of runs of a strategy. Wilcoxon's interval of the differences needs 10."""

NEVER = 1_000_000
"""Value of ``train.log_every`` without a line before the last step. The line makes the CPU wait for the GPU."""

PROFILED_STEPS = 3
ENDED_BY = 1
"""Steps after the profile that are left out, because the profiler stops in the first of them."""

STEP_TIMES = "all_step_times.json"
"""File in a run directory: wall and CPU times of all steps of rank 0, and the position of the profile."""

CLOCKS = {"wall": "step", "cpu": "CPU time of a step"}
"""Clocks that are compared. The CPU time of a process is nearly the same when other programs use the cores."""


@dataclass(frozen=True)
class StepTimes:
    """Times of all steps of a run by clock, in milliseconds. The profile starts, with its warm-up, at a step from 0."""

    milliseconds: dict[str, list[float]]
    profile_starts: int

    def of(self, part: str, clock: str, *, unmeasured: int) -> list[float]:
        """Return the times of the steps before, in or after the profile, without the first ones of the run.

        The profiled steps do not contain the warm-up. In a run without a profile they are ordinary ones.
        """
        start = self.profile_starts + WARMUP_STEPS
        end = start + PROFILED_STEPS
        parts = {
            "before": slice(unmeasured, self.profile_starts),
            "profiled": slice(start, end),
            "after": slice(end + ENDED_BY, None),
        }
        return self.milliseconds[clock][parts[part]]


class TimedSteps(Native):
    """The native trainer, which also writes the durations of all steps."""

    def train(
        self, build_model: ModelFactory, config: Config, context: Context, inputs: TrainingInputs
    ) -> tuple[EvaluableModel, Built]:
        """Train, and write the durations."""
        logger, marks = inputs.logger, [0.0]
        mark = logger.clock.mark

        def mark_both() -> None:
            mark()
            marks.append(time.process_time())

        logger.clock.mark = mark_both  # type: ignore[method-assign]
        result = super().train(build_model, config, context, inputs)
        if context.rank == 0:
            wall = [1000 * seconds for seconds in logger.clock.durations()]
            cpu = [1000 * (end - start) for start, end in itertools.pairwise(marks)]
            starts = middle_window(inputs.plan.total_steps).steps_before
            times = StepTimes({"wall": wall, "cpu": cpu}, starts)
            (context.run_dir / STEP_TIMES).write_text(json.dumps(asdict(times)))
        return result


class ProfiledMiddle(TimedSteps):
    """The same, with the profile in the middle of the training."""

    def train(
        self, build_model: ModelFactory, config: Config, context: Context, inputs: TrainingInputs
    ) -> tuple[EvaluableModel, Built]:
        """Train with another window of the profiler."""
        middle = middle_window(inputs.plan.total_steps)
        with patch.object(ProfileWindow, "of", lambda *_, **__: middle):
            return super().train(build_model, config, context, inputs)


def middle_window(total_steps: int) -> ProfileWindow:
    """Return the window of the profiler in the middle of a training."""
    return ProfileWindow((total_steps - WARMUP_STEPS - PROFILED_STEPS) // 2, PROFILED_STEPS)


def paired_runs(name: str, overrides: Sequence[str], workers: int) -> Iterator[Run]:
    """Yield the pairs of runs of a strategy. Random order in each pair keeps slow changes of the machine out.

    All have the same seed, so they share the random weights. A sweep has no two equal runs, so ``log_every`` differs.
    """
    order = random.Random(name)
    for pair in range(PAIRS):
        kinds = [("plain", "TimedSteps", 0), ("profiled", "ProfiledMiddle", PROFILED_STEPS)]
        order.shuffle(kinds)
        for kind, engine, steps in kinds:
            profile = (f"engine._target_=benchmarks.profiling.{engine}", f"train.profile_steps={steps}")
            yield Run(f"{name} {pair} {kind}", (*overrides, f"train.log_every={NEVER + pair}", *profile), workers)


def read_times(record: Record) -> StepTimes:
    """Return the step times of a run."""
    return StepTimes(**json.loads((Path(record["directory"]) / STEP_TIMES).read_text()))


def compare_pairs(plain: Sequence[Sequence[float]], profiled: Sequence[Sequence[float]]) -> Shift:
    """Return by how much the median step of the profiled runs is longer, with a 95 % interval over the pairs."""
    medians = (map(statistics.median, runs) for runs in (plain, profiled))
    return estimate_shift([other / one - 1 for one, other in zip(*medians, strict=True)])

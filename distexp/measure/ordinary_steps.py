"""The steps of a rank that can be compared with each other, to measure what it costs to watch for slow ranks."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from distexp.runs.full_disk import print_despite_full_disk, write_despite_full_disk
from distexp.runs.step_times import StepTime, write_step_times

MAX_STEPS = 4096
"""The latest steps that are kept."""


class OrdinarySteps:
    """Measured steps that directly follow another measured step.

    The others follow an evaluation, a checkpoint or the unmeasured first steps.
    """

    def __init__(self) -> None:
        self._watched: deque[tuple[int, bool]] = deque(maxlen=MAX_STEPS)
        self._follows_step = False

    def restart(self) -> None:
        """Leave out the next measured step, because it follows something other than a step."""
        self._follows_step = False

    def end_step(self, step: int, *, watched: bool) -> None:
        """Add a measured step with its number among them."""
        if self._follows_step:
            self._watched.append((step, watched))
        self._follows_step = True

    def times(self, durations: Sequence[float]) -> list[StepTime]:
        """Return the steps with their durations, given those of all measured steps in seconds."""
        return [StepTime(step, durations[step], watched) for step, watched in self._watched if step < len(durations)]


def save_step_times(run_dir: Path, rank: int, steps: Sequence[StepTime]) -> None:
    """Write the steps of a rank. The training is finished, so an error is only printed."""
    try:
        write_despite_full_disk(run_dir, lambda: write_step_times(run_dir, rank, steps))
    except OSError as error:
        print_despite_full_disk(f"note: the step times of rank {rank} cannot be written: {error}")


def median_duration_s(steps: Sequence[StepTime], *, watched: bool) -> float | None:
    """Return the median duration of the watched or of the other steps; None if there is none."""
    chosen = [step.seconds for step in steps if step.watched == watched]
    return statistics.median(chosen) if chosen else None

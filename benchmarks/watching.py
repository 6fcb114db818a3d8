"""What it costs to watch for slow ranks: pairs of consecutive steps of one run, of which one is watched."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distexp.config import Config
from distexp.distributed.context import Context
from distexp.engines.native import Native
from distexp.measure.rank_times import RankTimesWatch
from distexp.runs.record_sections import Built
from distexp.runs.step_files import StepTime, read_step_times
from distexp.strategies.base import EvaluableModel
from distexp.training.inputs import ModelFactory, TrainingInputs

NORMAL_95 = 1.96
"""Standard normal quantile for a two-sided interval of 95 %."""


class RandomPairs:
    """Schedule that watches one step of each pair of consecutive steps, chosen at random.

    All ranks choose the same steps, because they have the same seed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, step: int) -> bool:
        """Return whether a measured step is watched, by its number."""
        pair, position = divmod(step, 2)
        return random.Random(f"{self.seed} {pair}").randrange(2) == position


class PairedWatching(Native):
    """The native trainer, which watches one step of each pair for slow ranks."""

    def train(
        self, build_model: ModelFactory, config: Config, context: Context, inputs: TrainingInputs
    ) -> tuple[EvaluableModel, Built]:
        """Train with the schedule of ``RandomPairs``."""
        (ranks,) = (one for one in inputs.logger.watchers.members if isinstance(one, RankTimesWatch))
        ranks.waits.is_due = RandomPairs(config.train.seed)
        return super().train(build_model, config, context, inputs)


@dataclass(frozen=True)
class Shift:
    """A median difference with its 95 % interval."""

    median: float
    low: float
    high: float


def read_differences(run_dir: Path, workers: int) -> list[float]:
    """Return watched minus unwatched time of each complete pair, as a fraction of the median unwatched step.

    The duration of a step is the mean over the ranks.
    """
    ranks = [{step.step: step for step in read_step_times(run_dir, rank)} for rank in range(workers)]
    return pair_differences(ranks)


def pair_differences(ranks: Sequence[dict[int, StepTime]]) -> list[float]:
    """Return the relative differences of pairs, given the steps of each rank by their numbers."""
    steps = {step: step_time.watched for step, step_time in ranks[0].items() if all(step in rank for rank in ranks)}
    seconds = {step: statistics.fmean(rank[step].seconds for rank in ranks) for step in steps}
    pairs = [(step, step + 1) for step in steps if step % 2 == 0 and step + 1 in steps]
    differences = [
        seconds[first] - seconds[second] if steps[first] else seconds[second] - seconds[first]
        for first, second in pairs
        if steps[first] != steps[second]
    ]
    unwatched = [seconds[step] for step, watched in steps.items() if not watched]
    return [difference / statistics.median(unwatched) for difference in differences]


def estimate_shift(differences: Sequence[float]) -> Shift:
    """Return the Hodges-Lehmann estimate: the median of the means of all pairs of differences, and of each alone.

    The interval has the values that Wilcoxon's signed-rank test does not reject, by its normal approximation
    (Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, section 3.3).

    Raises:
        ValueError: for fewer than 10 differences.
    """
    count = len(differences)
    if count < 10:
        raise ValueError(f"{count} pairs of steps are too few for an interval: at least 10")
    means = sorted((a + b) / 2 for index, a in enumerate(differences) for b in differences[: index + 1])
    expected, deviation = count * (count + 1) / 4, math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    rejected = math.floor(expected - NORMAL_95 * deviation)
    return Shift(statistics.median(means), means[rejected], means[-rejected - 1])

"""Candidates of a search, and their trials."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from distexp.config import Config
from distexp.plan.estimate import Estimate
from distexp.resolve.resources import launcher_traits
from distexp.runs.record_sections import Predicted

COMPLETED = "completed"
OOM_GPU, OOM_HOST = "oom_gpu", "oom_host"
OUT_OF_MEMORY = (OOM_GPU, OOM_HOST)


class Status(StrEnum):
    """Status of a candidate. After a search none is waiting."""

    WAITING = "waiting"
    PRUNED = "pruned"
    TRIED = "tried"
    FAILED = "failed"


class Objective(StrEnum):
    """A value of ``choose.objective``."""

    THROUGHPUT = "throughput"
    ENERGY = "energy"
    COST = "cost"
    MEMORY = "memory"


@dataclass(frozen=True)
class Trial:
    """One short run of a candidate.

    Attributes:
        steps: Number of measured steps.
        status: Status of the run's record.
        directory: Run directory; None if there is none.
        step_s: Median time of a step.
        samples_per_second: Throughput of all workers together.
        peak_allocated_mib: Highest peak of any worker.
        j_per_sample: Energy of a sample.
        price_per_sample: Price of a sample.
        gpu_seconds: Time of the trial, with its start, times the number of workers.
        error: Why it failed, in one line; empty if it did not.
        disturbed: Whether its repeat was so much better that this trial does not count.
        dropout: Largest dropout rate of its model; None if it is unknown.
    """

    steps: int
    status: str
    directory: Path | None = None
    step_s: float | None = None
    samples_per_second: float | None = None
    peak_allocated_mib: float | None = None
    j_per_sample: float | None = None
    price_per_sample: float | None = None
    gpu_seconds: float = 0.0
    error: str = ""
    disturbed: bool = False
    dropout: float | None = None

    def score(self, objective: Objective) -> float | None:
        """Return what the objective minimizes; None if it is unknown.

        Nothing needs no energy. If a short run has 0, its counter did not advance.
        """
        return self.measured(objective) or None

    def measured(self, objective: Objective) -> float | None:
        """Return what the objective minimizes, as measured; None if the run did not measure it."""
        speed = self.samples_per_second
        return {
            Objective.THROUGHPUT: 1 / speed if speed else None,
            Objective.ENERGY: self.j_per_sample,
            Objective.COST: self.price_per_sample,
            Objective.MEMORY: self.peak_allocated_mib,
        }[objective]


@dataclass(eq=False)
class Candidate:
    """One configuration of a search. The search changes status, reason and trials in place.

    Attributes:
        overrides: Overrides besides those of the command.
        family: The overrides without that of the micro-batch.
        micro_batch: Samples per worker and forward pass; 0 for an invalid candidate of which it is not known.
        workers: Number of workers.
        config: Resolved configuration; None for an invalid candidate.
        estimate: Estimate of ``plan``; None if it was not predicted, or if it follows from another member.
        predicted: Prediction of its memory; None as for ``estimate``.
        expected_mib: Expected peak, perhaps interpolated; None if it is unknown. On a GPU it is that of the allocated
            memory, on CPUs that of all processes of a node.
        too_close: Whether the prediction is not certain that it fits. Such a candidate is tried after the others.
        forecast_s: Forecast of the step time; None if it is unknown.
        reason: Why it is pruned or failed.
        trials: All of its trials, in order.
    """

    overrides: tuple[str, ...]
    family: tuple[str, ...]
    micro_batch: int
    workers: int = 1
    config: Config | None = None
    estimate: Estimate | None = None
    predicted: Predicted | None = None
    expected_mib: float | None = None
    too_close: bool = False
    forecast_s: float | None = None
    status: Status = Status.WAITING
    reason: str = ""
    trials: tuple[Trial, ...] = field(default=())

    def prune(self, reason: str) -> None:
        """Remove the candidate from the search."""
        self.status, self.reason = Status.PRUNED, reason

    @property
    def on_cpus(self) -> bool:
        """Return whether its workers have no GPUs."""
        return self.config is not None and self.config.cluster.device == "cpu"

    @property
    def queues(self) -> bool:
        """Return whether its trials wait in a queue, so that several may run at the same time."""
        return self.config is not None and launcher_traits(self.config).queues

    @property
    def completed(self) -> tuple[Trial, ...]:
        """Return the trials that completed, without disturbed ones."""
        return tuple(trial for trial in self.trials if trial.status == COMPLETED and not trial.disturbed)

    @property
    def longest_steps(self) -> int:
        """Return the measured steps of the longest trial that completed; 0 without one."""
        return max((trial.steps for trial in self.completed), default=0)

    def score(self, objective: Objective) -> float | None:
        """Return the mean score of the completed trials, weighted by their steps; None without one."""
        found = [(trial.score(objective), trial.steps) for trial in self.completed]
        known = [(score, steps) for score, steps in found if score is not None]
        return sum(score * steps for score, steps in known) / sum(steps for _, steps in known) if known else None

    @property
    def step_s(self) -> float | None:
        """Return the mean step time of the completed trials; None without one."""
        known = [trial.step_s for trial in self.completed if trial.step_s is not None]
        return sum(known) / len(known) if known else None

    def forecast(self, objective: Objective) -> float | None:
        """Return the forecast of a number in proportion to the score; None if it is unknown."""
        return self.expected_mib if objective is Objective.MEMORY else self._worker_time(self.forecast_s, objective)

    def measured_time(self, objective: Objective) -> float | None:
        """Return what ``forecast`` would be if it had no error, for an objective that is no memory."""
        return self._worker_time(self.step_s, objective)

    def _worker_time(self, step_s: float | None, objective: Objective) -> float | None:
        """Return a step time, for energy and cost that of all workers together."""
        return step_s if step_s is None or objective is Objective.THROUGHPUT else step_s * self.workers

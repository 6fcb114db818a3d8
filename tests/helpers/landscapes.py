"""Synthetic machines for the tests of searches: step times, memory, noise, and forecasts with errors."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from distexp.choose.candidate import Candidate, Objective, Trial
from distexp.choose.ranking import PlannedTrial

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
GLOBAL_BATCH = 64
STRATEGIES = ("strategy=ddp", "sharding=full_shard", "sharding=shard_grad_op", "zero_stage=1", "zero_stage=2")
FULL_STEPS = 20
"""Measured steps of a run of the exhaustive sweep."""


@dataclass
class Landscape:
    """A machine with random properties of each family.

    Attributes:
        noise: Standard deviation of the speed of a single step.
        trial_noise: Standard deviation of the logarithm of a whole trial's speed, as on a busy machine.
        start_s: Time of the start of a trial.
        limit: Memory of the GPU.
        forecast_error: Deviation of the forecasts of families, in doublings. Those of GPUs were 0.01 to 0.2 off.
        hidden_limit: Memory at which a run fails although its prediction fits, as on a busy GPU.
    """

    seed: int
    noise: float = 0.03
    trial_noise: float = 0.0
    forecast_error: float = 0.2
    start_s: float = 2.0
    limit: float = 40.0
    hidden_limit: float = 40.0
    candidates: list[Candidate] = field(default_factory=list)
    calls: int = 0

    def __post_init__(self) -> None:
        self.random, self.busy = random.Random(self.seed), random.Random(self.seed)
        self.true_s: dict[Candidate, float] = {}
        self.memory: dict[Candidate, float] = {}
        for workers in (1, 2):
            for strategy in ("strategy=single",) if workers == 1 else STRATEGIES:
                for checkpoints in (False, True):
                    for kernels in ("reference", "fast"):
                        self._add_family(workers, strategy, kernels, checkpoints=checkpoints)

    def _add_family(self, workers: int, strategy: str, kernels: str, *, checkpoints: bool) -> None:
        """Add the members of a family: launches, compute that saturates, and communication per micro-batch or step."""
        draw = self.random.uniform
        compute, launch = draw(0.010, 0.014), draw(0.005, 0.05)
        if kernels == "fast":
            compute, launch = compute * draw(0.5, 0.9), launch * draw(0.3, 0.8)
        if checkpoints:
            compute *= 1.33
        per_step, per_micro_batch = (0.0, 0.0) if workers == 1 else (draw(0.01, 0.2), draw(0.0, 0.03))
        states, sample = draw(8, 20) / (1 if strategy.endswith(("ddp", "single")) else workers), draw(0.4, 2.5)
        error = self.random.gauss(0, self.forecast_error)
        name = (strategy, f"workers={workers}", f"kernels={kernels}", *(["checkpoints"] if checkpoints else []))
        for size in MICRO_BATCHES:
            steps = GLOBAL_BATCH // workers // size
            busy = compute * size * (1 + draw(0.3, 1.0) / size)
            seconds = steps * (max(busy, launch) + per_micro_batch) + per_step
            candidate = Candidate((*name, f"micro={size}"), name, size, workers)
            self.true_s[candidate] = seconds
            self.memory[candidate] = states + sample * size * (0.3 if checkpoints else 1.0)
            candidate.forecast_s = seconds * 2.0 ** (error + self.random.gauss(0, self.forecast_error / 3))
            candidate.expected_mib = self.memory[candidate]
            if self.memory[candidate] > self.limit:
                candidate.prune("does not fit")
            self.candidates.append(candidate)

    def run(self, batch: Sequence[PlannedTrial]) -> list[Trial]:
        """Run trials with noise."""
        return [self._run(planned.candidate, planned.steps) for planned in batch]

    def _run(self, candidate: Candidate, steps: int) -> Trial:
        self.calls += 1
        if self.memory[candidate] > self.hidden_limit:
            return Trial(steps, "oom_gpu", gpu_seconds=self.start_s * candidate.workers)
        seconds = self.true_s[candidate] * (1 + self.random.gauss(0, self.noise / steps**0.5))
        seconds *= self.busy.lognormvariate(0.0, self.trial_noise)
        return Trial(
            steps,
            "completed",
            step_s=seconds,
            samples_per_second=GLOBAL_BATCH / seconds,
            peak_allocated_mib=self.memory[candidate],
            j_per_sample=seconds * candidate.workers * 300 / GLOBAL_BATCH,
            gpu_seconds=(self.start_s + steps * seconds) * candidate.workers,
        )

    def value(self, candidate: Candidate, objective: Objective) -> float:
        """Return what the objective minimizes, without noise."""
        scale = candidate.workers if objective is Objective.ENERGY else 1
        return self.memory[candidate] if objective is Objective.MEMORY else self.true_s[candidate] * scale

    def runnable(self) -> list[Candidate]:
        """Return the candidates that run."""
        return [
            candidate for candidate in self.candidates if self.memory[candidate] <= min(self.limit, self.hidden_limit)
        ]

    def exhaustive_gpu_s(self) -> float:
        """Return the cost of the exhaustive sweep. A run that does not fit costs its start."""
        found = 0.0
        for candidate in self.candidates:
            steps_s = FULL_STEPS * self.true_s[candidate] if self.memory[candidate] <= self.limit else 0.0
            found += candidate.workers * (self.start_s + steps_s)
        return found

    def regret(self, winner: Candidate, objective: Objective) -> float:
        """Return how much worse a candidate is than the best one, relative to it."""
        best = min(self.value(candidate, objective) for candidate in self.runnable())
        return self.value(winner, objective) / best - 1

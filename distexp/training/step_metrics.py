"""Loss, accuracy, samples, tokens and waits of each training step."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, field, replace

import torch
from torch import Tensor

from distexp.config import ConfigError
from distexp.data.base import IGNORE, Workload
from distexp.data.loader import StepData
from distexp.distributed.process_group import sum_over_ranks
from distexp.measure.profiling.breakdown import have_other_sizes


class DivergedError(RuntimeError):
    """The loss is NaN or infinite."""


class LossHistory:
    """Loss and accuracy of each step, as means over all ranks.

    Each rank keeps its contributions on the device. ``reduce`` sums those of several steps in one collective.
    """

    def __init__(self, *, allows_nan: bool) -> None:
        self.losses: list[float] = []  # loss of each reduced step
        self.accuracies: list[float] = []  # accuracy of each reduced step, from 0 to 1; 0 for text
        self._allows_nan = allows_nan
        self._contributions: list[Tensor] = []  # of this rank, since the last reduction
        self._targets: list[Tensor] = []  # of all ranks, for the same steps

    def add(self, contribution: Tensor, targets: Tensor) -> None:
        """Add this rank's contribution to loss and accuracy of a step, shape (2,), and the targets of all ranks."""
        self._contributions.append(contribution)
        self._targets.append(targets)

    def reduce(self) -> None:
        """Sum the latest contributions over the ranks; raise DivergedError, or ConfigError if a step has no target."""
        if not self._contributions:
            return
        losses, accuracies = sum_over_ranks(torch.stack(self._contributions, dim=1)).tolist()
        self._contributions, targets = [], self._targets
        self._targets = []
        first = len(self.losses) + 1
        self.losses += losses
        self.accuracies += accuracies
        for step, (loss, count) in enumerate(zip(losses, targets, strict=True), start=first):
            if not self._allows_nan and not math.isfinite(loss):
                check_targets(count, f"step {step}", "raise train.micro_batch_size")
            self.check_finite(loss, f"step {step}")

    def check_finite(self, loss: float, source: str) -> None:
        """Raise DivergedError if a loss is NaN or infinite, unless this is allowed."""
        if not self._allows_nan and not math.isfinite(loss):
            raise DivergedError(
                f"the loss of {source} is {loss}: lower train.learning_rate, or set train.on_nan=record to continue"
            )


def check_targets(targets: float | Tensor, source: str, hint: str) -> None:
    """Raise ConfigError if no label of a source counts; the hint is what to set instead of correcting the data."""
    if not targets:
        raise ConfigError(
            f"{source} has no target: all its labels are {IGNORE}. Leave such samples out of the dataset, or {hint}"
        )


@dataclass
class StepCounts:
    """Counts of the steps of this attempt. *Measured* steps count for the speed."""

    samples: list[int] = field(default_factory=list)  # of each step and of all ranks; packed rows have different ones
    tokens: int = 0  # tokens of this rank, without padding
    positions: int = 0  # tokens of this rank, with padding
    measured_steps: int = 0  # number of measured steps
    measured_samples: int = 0  # their samples, of all ranks
    measured_tokens: int = 0  # their tokens on this rank, without padding
    measured_work: Workload = field(default_factory=Workload)  # sizes of their batches on this rank
    data_waits_s: list[float] = field(default_factory=list)  # time that this rank waited for data in each of them
    sizes: list[tuple[int, ...]] = field(default_factory=list)  # batch sizes of the measured and the profiled steps

    def add(self, step: StepData, *, warmed_up: bool, measured: bool) -> None:
        """Add a step. One after the warm-up that is profiled has a size, but does not count for the speed."""
        tokens = sum(batch.num_tokens for batch in step.micro_batches)
        self.samples.append(step.num_samples)
        self.tokens += tokens
        self.positions += sum(batch.num_positions for batch in step.micro_batches)
        if warmed_up:
            work = step.workload
            # The logits of a token cost at most about as much as the layers for it.
            self.sizes.append((work.rows, work.positions + work.head_tokens))
        if measured:
            self.measured_steps += 1
            self.measured_samples += step.num_samples
            self.measured_tokens += tokens
            self.measured_work += step.workload
            self.data_waits_s.append(step.wait_s)

    def total(self, device: torch.device) -> tuple[StepCounts, bool]:
        """Return the sums over all ranks, and whether some rank has batches of different sizes; a collective."""
        counts = [self.measured_tokens, self.tokens, self.positions, int(have_other_sizes(self.sizes))]
        sums = sum_over_ranks(torch.tensor([*counts, *astuple(self.measured_work)], device=device)).tolist()
        measured_tokens, tokens, positions, ranks_that_differ, *work = sums
        summed = {"measured_tokens": measured_tokens, "tokens": tokens, "positions": positions}
        return replace(self, **summed, measured_work=Workload(*work)), ranks_that_differ > 0

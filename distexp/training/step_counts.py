"""Samples, tokens and waits of the training steps."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field

import torch

from distexp.data.loader import StepData
from distexp.data.workload import Workload
from distexp.distributed.process_group import sum_over_ranks
from distexp.measure.profiling.overhead import StepSizes


@dataclass
class StepCounts:
    """Counts of the steps of this attempt. *Measured* steps count for the speed.

    Attributes:
        samples: Samples of each step, of all ranks. Packed rows have different numbers of samples.
        tokens: Tokens of this rank, without padding.
        positions: Tokens of this rank, with padding.
        measured_steps: Number of measured steps.
        measured_samples: Their samples, of all ranks.
        measured_tokens: Their tokens on this rank, without padding.
        measured_work: Sizes of their batches on this rank.
        data_waits_s: Time that this rank waited for data in each of them.
        sizes: Smallest and largest batches of the measured and the profiled steps.
    """

    samples: list[int] = field(default_factory=list)
    tokens: int = 0
    positions: int = 0
    measured_steps: int = 0
    measured_samples: int = 0
    measured_tokens: int = 0
    measured_work: Workload = field(default_factory=Workload)
    data_waits_s: list[float] = field(default_factory=list)
    sizes: StepSizes = field(default_factory=StepSizes)

    def add(self, step: StepData, *, warmed_up: bool, measured: bool) -> None:
        """Add a step.

        Args:
            step: The data of the step.
            warmed_up: Whether the warm-up of the training is over.
            measured: Whether the step counts for the speed. A profiled step does not.
        """
        tokens = sum(batch.num_tokens for batch in step.micro_batches)
        self.samples.append(step.num_samples)
        self.tokens += tokens
        self.positions += sum(batch.num_positions for batch in step.micro_batches)
        if warmed_up:
            work = step.workload
            # The logits of a token cost at most about as much as the layers for it.
            self.sizes.add(work.rows, work.positions + work.head_tokens)
        if measured:
            self.measured_steps += 1
            self.measured_samples += step.num_samples
            self.measured_tokens += tokens
            self.measured_work += step.workload
            self.data_waits_s.append(step.wait_s)

    def total(self, device: torch.device) -> TotalCounts:
        """Return the sums over all ranks; a collective."""
        counts = [self.measured_tokens, self.tokens, self.positions, int(self.sizes.differ)]
        sums = sum_over_ranks(torch.tensor([*counts, *astuple(self.measured_work)], device=device)).tolist()
        measured_tokens, tokens, positions, ranks_that_differ, *work = sums
        return TotalCounts(measured_tokens, tokens, positions, ranks_that_differ > 0, Workload(*work))


@dataclass(frozen=True)
class TotalCounts:
    """Counts of all ranks.

    Attributes:
        measured_tokens: Tokens of the measured steps, without padding.
        tokens: Tokens of all steps of this attempt, without padding.
        positions: Tokens of all steps of this attempt, with padding.
        sizes_differ: Whether the batches of some rank have different sizes.
        measured_work: Sizes of the batches of the measured steps.
    """

    measured_tokens: int
    tokens: int
    positions: int
    sizes_differ: bool
    measured_work: Workload

    @property
    def padding_share(self) -> float | None:
        """Return the share of padding; None for images, or if a custom collate function counts no tokens."""
        return 1 - self.tokens / self.positions if self.tokens and self.positions else None

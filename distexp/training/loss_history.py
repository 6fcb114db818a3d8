"""Loss and accuracy of each training step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from distexp.config import ConfigError
from distexp.data.base import IGNORE
from distexp.distributed.process_group import sum_over_ranks


class DivergedError(RuntimeError):
    """The loss is NaN or infinite."""


class LossHistory:
    """Loss and accuracy of each step, as means over all ranks.

    Each rank keeps its contributions on the device. ``reduce`` sums those of several steps in one collective.

    Attributes:
        losses: Loss of each reduced step.
        accuracies: Accuracy of each reduced step, from 0 to 1; 0 for text.
    """

    def __init__(self, *, allows_nan: bool) -> None:
        """Create a history without steps.

        Args:
            allows_nan: Whether a loss may be NaN or infinite (``train.on_nan=record``).
        """
        self.losses: list[float] = []
        self.accuracies: list[float] = []
        self._allows_nan = allows_nan
        self._contributions: list[Tensor] = []  # of this rank, since the last reduction
        self._targets: list[Tensor] = []  # of all ranks, for the same steps

    def add(self, contribution: Tensor, targets: Tensor) -> None:
        """Add a step.

        Args:
            contribution: this rank's contribution to loss and accuracy, shape (2,).
            targets: number of targets of all ranks, a scalar.
        """
        self._contributions.append(contribution)
        self._targets.append(targets)

    def reduce(self) -> None:
        """Sum the contributions since the last call over the ranks.

        Raises:
            ConfigError: a step has no target.
            DivergedError: a loss is NaN or infinite.
        """
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
                self.check_targets(count, f"step {step}", "raise train.micro_batch_size")
            self.check_finite(loss, f"step {step}")

    def check_finite(self, loss: float, source: str) -> None:
        """Raise DivergedError if a loss is NaN or infinite, unless this is allowed."""
        if not self._allows_nan and not math.isfinite(loss):
            raise DivergedError(
                f"the loss of {source} is {loss}: lower train.learning_rate, or set train.on_nan=record to continue"
            )

    @staticmethod
    def check_targets(targets: float | Tensor, source: str, hint: str) -> None:
        """Raise ConfigError if no label counts towards a loss.

        Args:
            targets: number of targets of all ranks.
            source: what has these labels: ``step 5``.
            hint: what the user can set instead of correcting the data.
        """
        if not targets:
            raise ConfigError(
                f"{source} has no target: all its labels are {IGNORE}. Leave such samples out of the dataset, or {hint}"
            )

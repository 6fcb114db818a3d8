"""The two protocols of a way of distributing a training.

A Strategy decides before anything runs (and so imports torch only inside ``setup``); an DistributedModel is all
that the training loop knows afterwards. A new strategy is one file here and one YAML in conf/strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from distexp.config import Config
from distexp.runs.record import Built

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from distexp.data.base import Batch
    from distexp.distributed.context import Context
    from distexp.models.blueprint import Blueprint


class EvaluableModel(Protocol):
    """A model as it is distributed: it can be run, and says what it is."""

    @property
    def model(self) -> nn.Module:
        """As it is called; switched to training or evaluation by its own ``train`` and ``eval``."""

    def forward(self, batch: Batch) -> Any:
        """The model's outputs, without gradients, in the precision of the training."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every trained parameter and every buffer, whole, on this rank's device, one at a time.

        A collective: every rank must take all of them. Names are the bare model's.
        """

    def describe(self) -> Built:
        """What was really built, read off the live objects."""


class DistributedModel(EvaluableModel, Protocol):
    """A model that trains, whatever is behind it."""

    def forward_backward(self, batch: Batch, *, normalizer: Tensor, last_micro: bool) -> Tensor:
        """Adds a micro-batch's gradients.

        ``normalizer`` counts the targets of the whole global step, over all ranks and micro-batches,
        so that unequal lengths weigh as they do on one worker. Returns this rank's shares of the step's
        mean loss and accuracy, shape (2,), detached: they add up over micro-batches and ranks.
        """

    def step(self, learning_rate: float) -> Tensor:
        """Clips, updates the weights and clears the gradients; the global gradient norm before clipping."""

    @property
    def checkpoint_format(self) -> str:
        """Who writes the weights in ``save``, and what must be the same where they are read."""

    def save(self, folder: Path) -> None:
        """Writes weights, optimizer and loss scale into a new folder; a collective."""

    def load(self, folder: Path) -> None:
        """Takes up what an engine of the same ``checkpoint_format`` saved; a collective, before the first step.

        Hyperparameters stay those of this run.
        """


COMMUNICATION = "communication"
"""Requirement of a strategy that runs several workers."""


class Strategy(Protocol):
    """A way of distributing a training, with its options."""

    requires: tuple[str, ...]
    """What must work on the machine: ``COMMUNICATION`` between workers, and names of libraries."""

    def set_defaults(self, config: Config) -> None:
        """Fills in what the user left open in this strategy's section."""

    def validate(self, config: Config) -> list[str]:
        """A sentence for each thing that this strategy cannot do as asked."""

    def expected_build(self, config: Config) -> Mapping[str, Any]:
        """The fields of Built that must come out; a difference stops the run."""

    def setup(self, blueprint: Blueprint, config: Config, context: Context) -> DistributedModel:
        """Brings the model to life where it belongs, distributes it and builds its optimizer."""

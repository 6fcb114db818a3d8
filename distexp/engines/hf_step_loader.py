"""The steps of an epoch, as the data loader of ``transformers.Trainer``."""

from __future__ import annotations

from collections.abc import Iterator

from distexp.data.loader import StepData
from distexp.training.inputs import TrainingInputs


class StepLoader:
    """The steps of an epoch, as a data loader for the Trainer.

    Its length is the number of micro-batches.
    """

    def __init__(self, inputs: TrainingInputs) -> None:
        self.inputs, self.epoch = inputs, 0

    def __len__(self) -> int:
        return len(self.inputs.training.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; the Trainer calls this before each epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[StepData]:
        logger = self.inputs.logger
        remaining_steps = self.inputs.plan.steps_of(self.epoch, logger.steps)
        return self.inputs.training.iter_steps(self.epoch, remaining_steps)

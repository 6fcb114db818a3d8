"""The model that ``transformers.Trainer`` has distributed, for evaluations and exports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from distexp.data.base import Batch
from distexp.engines.hf_built import describe
from distexp.engines.hf_loop import DistexpTrainer
from distexp.runs.record_sections import Built


class HFEvaluableModel:
    """The EvaluableModel of a Trainer."""

    def __init__(self, trainer: DistexpTrainer) -> None:
        self.trainer = trainer

    @property
    def module(self) -> nn.Module:
        """Return the module as the Trainer wrapped it."""
        wrapped: nn.Module = self.trainer.model_wrapped
        return wrapped

    @torch.no_grad()
    def forward(self, batch: Batch) -> Any:
        """Return the outputs of the module. The Trainer casts images for DeepSpeed, and accelerate for the others."""
        return self.module(**self.trainer._prepare_inputs(batch.inputs))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter and buffer in full, on this rank's device; a collective."""
        return self.trainer.adapter.weights(self.module)

    def describe(self) -> Built:
        """Return what was built."""
        trainer = self.trainer
        return describe(trainer, trainer.config.strategy.name, trainer.unwrapped, trainer.adapter.units)

"""``transformers.Trainer`` with the data, optimizer, loss and metrics of distexp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer

from distexp.config import Config
from distexp.config.targets import locate
from distexp.data.base import Batch
from distexp.data.loader import StepData
from distexp.distributed.context import Context
from distexp.engines.hf_adapters import HFAdapter
from distexp.engines.hf_arguments import training_arguments
from distexp.engines.hf_step_loader import StepLoader
from distexp.models.blueprint import Blueprint
from distexp.models.objective import loss_sum, partial_metrics
from distexp.strategies.base import load_strategy
from distexp.strategies.optimizer import clip_gradients
from distexp.training.inputs import TrainingInputs


class DistexpTrainer(Trainer):  # type: ignore[misc]  # transformers has no types
    """A transformers.Trainer that takes steps, loss, optimizer and clipping from distexp."""

    optimizer: Any  # the attribute of transformers.Trainer: None, distexp's optimizer, then accelerate's wrapper
    own_optimizer: Any = None  # distexp's optimizer

    def __init__(self, blueprint: Blueprint, config: Config, context: Context, inputs: TrainingInputs) -> None:
        self.config, self.context, self.inputs = config, context, inputs
        self.task, self.unwrapped = config.model.task, blueprint.model
        self.strategy = load_strategy(config)
        target = self.strategy.own_hf_adapter()
        assert target is not None, "HFTrainer.validate refuses strategies without one"
        self.adapter: HFAdapter = locate(target)(blueprint, config, context)
        self.step: StepData | None = None
        self.contributions: list[Tensor] = []  # of this rank to loss and accuracy, one for each micro-batch
        self.gradient_norm: Tensor | float | None = None  # of the last step, before clipping
        super().__init__(
            model=self.unwrapped,
            args=training_arguments(config, context, inputs.plan.total_steps, self.adapter),
            compute_loss_func=self._loss,
        )
        self.remove_callback(PrinterCallback)
        self.adapter.configure_accelerator(self.accelerator)

    def get_train_dataloader(self) -> Any:
        """Return distexp's loader, which is already sharded over the ranks."""
        return StepLoader(self.inputs)

    def get_batch_samples(self, epoch_iterator: Iterator[StepData], num_batches: int, device: torch.device) -> Any:
        """Return the micro-batches of the next step and its number of targets."""
        self.step, self.contributions = next(epoch_iterator), []
        inputs = [{**batch.inputs, "labels": batch.labels} for batch in self.step.micro_batches]
        return inputs, self.step.normalizer

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Return the optimizer of the native loop, over the Trainer's model."""
        if self.optimizer is None:
            self.own_optimizer = self.adapter.build_optimizer(self.model if model is None else model)
            self.optimizer = self.own_optimizer
        return self.optimizer

    def training_step(self, model: nn.Module, *arguments: Any, **keywords: Any) -> Tensor:
        """Run one micro-batch."""
        self.inputs.logger.watchers.start_forward()
        loss: Tensor = super().training_step(model, *arguments, **keywords)
        return loss

    def _loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        """Return this rank's contribution to the mean loss.

        The Trainer corrects for the averaging of gradients over the ranks.
        """
        batch = Batch({}, labels, num_samples=0, num_targets=0, num_tokens=0)  # loss_sum reads only the labels
        loss = loss_sum(self.task, outputs, batch) / num_items_in_batch
        self.contributions.append(partial_metrics(self.task, outputs, batch, loss, num_items_in_batch))
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip as the native loop does.

        On a CPU, torch's norm has only five correct digits.
        """
        if self.adapter.steps_itself:
            return super()._clip_grad_norm(model)
        self.accelerator.unscale_gradients()
        return clip_gradients(model.parameters(), self.config.train.gradient_clipping)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return and keep the norm before clipping; measure it if nothing was clipped."""
        if grad_norm is None:
            grad_norm = self._clip_grad_norm(model)
        self.gradient_norm = super()._get_grad_norm(model, grad_norm)
        return self.gradient_norm

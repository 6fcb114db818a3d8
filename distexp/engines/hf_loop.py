"""``transformers.Trainer`` with the data, optimizer, loss and metrics of distexp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback

from distexp.config import Config
from distexp.config.targets import locate
from distexp.data.base import Batch
from distexp.data.loader import StepData
from distexp.distributed.context import Context
from distexp.engines.base import check_built
from distexp.engines.hf_adapters import HFAdapter
from distexp.engines.hf_arguments import training_arguments
from distexp.engines.hf_built import describe
from distexp.engines.model_watches import watch_model
from distexp.models.blueprint import Blueprint
from distexp.models.objective import loss_sum, partial_metrics
from distexp.runs.record_sections import Built
from distexp.strategies.base import Strategy, load_strategy
from distexp.strategies.model_tensors import innermost_optimizer
from distexp.strategies.optimizer import clip_gradients
from distexp.system.seeding import seed_everything
from distexp.training.inputs import TrainingInputs
from distexp.training.loop import end_epoch


class DistexpTrainer(Trainer):  # type: ignore[misc]  # transformers has no types
    """A transformers.Trainer that follows the step plan and uses the MetricsLogger.

    Attributes:
        built: what the Trainer built; None before ``train``.
        evaluable: the model as the Trainer distributed it.
    """

    optimizer: Any  # the attribute of transformers.Trainer: None, distexp's optimizer, then accelerate's wrapper
    own_optimizer: Any = None  # distexp's optimizer

    def __init__(self, blueprint: Blueprint, config: Config, context: Context, inputs: TrainingInputs) -> None:
        self.config, self.context, self.inputs = config, context, inputs
        self.task, self.unwrapped = config.model.task, blueprint.model
        self.strategy = load_strategy(config)
        self.adapter = build_adapter(self.strategy, blueprint, config, context)
        self.step: StepData | None = None
        self.contributions: list[Tensor] = []  # of this rank to loss and accuracy, one for each micro-batch
        self.norm: Tensor | float | None = None  # of the gradients of the last step, before clipping
        self.built: Built | None = None
        super().__init__(
            model=self.unwrapped,
            args=training_arguments(config, context, inputs.plan.total_steps, self.adapter),
            compute_loss_func=self._loss,
            callbacks=[_LoggingCallback(self)],
        )
        self.remove_callback(PrinterCallback)
        self.adapter.configure_accelerator(self.accelerator)
        self.evaluable = TrainerModel(self)

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
        """Run one micro-batch, and count its activations in the first step."""
        self.inputs.logger.parts.start_forward()
        with self.inputs.logger.parts.count_activations(model):
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
        self.norm = super()._get_grad_norm(model, grad_norm)
        return self.norm


def build_adapter(strategy: Strategy, blueprint: Blueprint, config: Config, context: Context) -> HFAdapter:
    """Build the adapter that a strategy names."""
    target = strategy.own_hf_adapter()
    assert target is not None, "HFTrainer.validate refuses strategies without one"
    adapter: HFAdapter = locate(target)(blueprint, config, context)
    return adapter


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


class TrainerModel:
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
        """Return the outputs of the module; accelerate casts to the precision."""
        return self.module(**batch.inputs)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter and buffer in full, on this rank's device; a collective."""
        return self.trainer.adapter.weights(self.module)

    def describe(self) -> Built:
        """Return what was built."""
        trainer = self.trainer
        return describe(trainer, trainer.config.strategy.name, trainer.unwrapped, trainer.adapter.units)


class _LoggingCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """A callback that calls the MetricsLogger at the same points as the native loop."""

    def __init__(self, trainer: DistexpTrainer) -> None:
        self.trainer, self.inputs = trainer, trainer.inputs
        self.rate = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        trainer = self.trainer
        trainer.built = trainer.evaluable.describe()
        self._check_built(trainer.built)
        trainer.adapter.start(trainer)
        optimizer = getattr(trainer.model_wrapped, "optimizer", trainer.optimizer)
        watch_model(trainer.model_wrapped, optimizer, self.inputs.logger)
        seed_everything(trainer.config.train.seed + trainer.context.rank)
        self.inputs.logger.start()

    def _check_built(self, built: Built) -> None:
        """Raise RuntimeError if the model or the optimizer is not the requested one."""
        trainer = self.trainer
        check_built(built, trainer.strategy.expected_build(trainer.config))
        if innermost_optimizer(trainer.optimizer) is not trainer.own_optimizer:
            raise RuntimeError(f"the Trainer replaced the optimizer of distexp by {built.optimizer}")

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.inputs.logger.start_steps()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.rate = self.inputs.plan.learning_rate(state.global_step)
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = self.rate

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        if not self.trainer.adapter.steps_itself:  # otherwise the update is over, and HFAdapter.start observes it
            self.inputs.logger.before_update()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        assert trainer.step is not None
        total = torch.stack(trainer.contributions).sum(dim=0)
        self.inputs.logger.record_step(trainer.step, total, torch.as_tensor(trainer.norm), self.rate)

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        end_epoch(self.trainer.evaluable, self.inputs)

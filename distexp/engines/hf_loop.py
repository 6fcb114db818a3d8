"""The Trainer with our data, optimizer and loss in the places that it leaves for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback

from distexp.config import Config
from distexp.config.targets import load_strategy
from distexp.data.base import Batch
from distexp.data.shards import StepData
from distexp.distributed.context import Context
from distexp.engines.base import TrainingInputs, check_built
from distexp.engines.hf_arguments import training_arguments
from distexp.engines.hf_built import describe, innermost
from distexp.models.blueprint import Blueprint
from distexp.models.introspection import find_blocks
from distexp.models.objective import loss_sum, partial_metrics
from distexp.runs.record import Built
from distexp.strategies import ds_model
from distexp.strategies.optimizer import build_optimizer, clip_gradients
from distexp.strategies.torch_model import whole_weights
from distexp.system.seeding import seed_everything
from distexp.training.loop import end_epoch


class DistexpTrainer(Trainer):  # type: ignore[misc]  # transformers has no types
    """Trains by the plan, and tells the logger what our loop tells it.

    Attributes:
        built: what the Trainer made of the model; None before ``train``.
        wrapped: the model as the Trainer distributed it.
    """

    optimizer: Any  # the Trainer's own attribute: None, then our optimizer, then what accelerate put around it
    given: Any = None  # our optimizer

    def __init__(self, blueprint: Blueprint, config: Config, context: Context, inputs: TrainingInputs) -> None:
        self.config, self.context, self.inputs = config, context, inputs
        self.task, self.bare = config.model.task, blueprint.model
        self.units: list[nn.Module] = []
        self.masters: Blueprint | None = None  # what DeepSpeed's fp32 masters are to be, until they are
        settings = None
        if config.strategy.name == "deepspeed":
            settings = ds_model.settings_for(blueprint, config, context)
            # Where it is forced, accelerate makes a CPU Adam of what it is given: of ours, one without AdamW's decay.
            settings["zero_force_ds_cpu_optimizer"] = False
            ds_model.materialize(blueprint, config, settings)
            self.masters = blueprint if ds_model.in_16_bits(config) else None
        else:
            blueprint.materialize(self.bare)
        if config.strategy.name == "fsdp":
            self.units = [block for _, block in find_blocks(self.bare, config.fsdp.wrap)]
        names = sorted({type(unit).__name__ for unit in self.units})
        self.step: StepData | None = None
        self.shares: list[Tensor] = []
        self.norm: Tensor | float | None = None
        self.built: Built | None = None
        super().__init__(
            model=self.bare,
            args=training_arguments(config, context, inputs.plan.total_steps, units=names, settings=settings),
            compute_loss_func=self._loss,
            callbacks=[_Recorder(self)],
        )
        self.remove_callback(PrinterCallback)
        ddp = self.accelerator.ddp_handler
        ddp.bucket_cap_mb, ddp.static_graph = config.ddp.bucket_cap_mb, config.ddp.static_graph
        ddp.find_unused_parameters = config.ddp.find_unused_parameters
        ddp.gradient_as_bucket_view = True
        self.wrapped = TrainerModel(self)

    def get_train_dataloader(self) -> Any:
        """Our loader, which accelerate must not shard once more."""
        return Steps(self.inputs)

    def get_batch_samples(self, epoch_iterator: Iterator[StepData], num_batches: int, device: torch.device) -> Any:
        """The micro-batches of the next step, and the targets of all ranks in it."""
        self.step, self.shares = next(epoch_iterator), []
        inputs = [{**batch.inputs, "labels": batch.labels} for batch in self.step.micro_batches]
        return inputs, self.step.normalizer

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """The optimizer that our loop has, over the Trainer's model."""
        if self.optimizer is None:
            target = self.model if model is None else model
            if self.config.strategy.name == "deepspeed":
                self.given = ds_model.optimizer_for(target, self.config, self.context)
            else:
                fused = self.context.device.type == "cuda" and not self.config.offload.enabled
                self.given = build_optimizer(target, self.config.train, fused=fused)
            self.optimizer = self.given
        return self.optimizer

    def _loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        """This rank's share of the step's mean loss; the Trainer makes up for the averaging of gradients."""
        batch = Batch({}, labels, num_samples=0, num_targets=0, num_tokens=0)  # the loss asks for labels only
        loss = loss_sum(self.task, outputs, batch) / num_items_in_batch
        self.shares.append(partial_metrics(self.task, outputs, batch, loss, num_items_in_batch))
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clips as our loop does: torch's own norm of a whole model has five good digits on a CPU."""
        if self.config.strategy.name == "deepspeed":
            return super()._clip_grad_norm(model)
        self.accelerator.unscale_gradients()
        return clip_gradients(model.parameters(), self.config.train.gradient_clipping)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The norm before clipping, kept for the logger; measured here where nothing is clipped."""
        if grad_norm is None:
            grad_norm = self._clip_grad_norm(model)
        self.norm = super()._get_grad_norm(model, grad_norm)
        return self.norm


class Steps:
    """The steps of an epoch; to the Trainer a loader of as many micro-batches."""

    def __init__(self, inputs: TrainingInputs) -> None:
        self.inputs, self.epoch = inputs, 0

    def __len__(self) -> int:
        return len(self.inputs.training.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer before each epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[StepData]:
        inputs = self.inputs
        return inputs.logger.timed(
            inputs.training.iter_steps(self.epoch, inputs.plan.steps_of(self.epoch, inputs.logger.steps))
        )


class TrainerModel:
    """The Trainer's model behind the protocol of what can be evaluated."""

    def __init__(self, trainer: DistexpTrainer) -> None:
        self.trainer = trainer

    @property
    def model(self) -> nn.Module:
        """As the Trainer wrapped it."""
        wrapped: nn.Module = self.trainer.model_wrapped
        return wrapped

    @torch.no_grad()
    def forward(self, batch: Batch) -> Any:
        """The model's outputs in the precision of the training, which accelerate sees to."""
        return self.model(**batch.inputs)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer, whole, on this rank's device; a collective."""
        if self.trainer.config.strategy.name == "deepspeed":
            return ds_model.whole_weights(self.model)
        return whole_weights(self.model, self.trainer.context.device)

    def describe(self) -> Built:
        """What was really built."""
        trainer = self.trainer
        return describe(trainer, trainer.config.strategy.name, trainer.bare, trainer.units)


class _Recorder(TrainerCallback):  # type: ignore[misc]  # likewise
    """Calls the logger where our loop does."""

    def __init__(self, trainer: DistexpTrainer) -> None:
        self.trainer, self.inputs = trainer, trainer.inputs
        self.rate = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        trainer = self.trainer
        trainer.built = trainer.wrapped.describe()
        check_built(trainer.built, load_strategy(trainer.config).expected_build(trainer.config))
        if innermost(trainer.optimizer) is not trainer.given:
            raise RuntimeError(f"the Trainer put another optimizer in the place of ours: {trainer.built.optimizer}")
        if trainer.config.strategy.name == "deepspeed":
            if trainer.masters is not None:
                ds_model.restore_masters(trainer.model_wrapped, trainer.masters)
                trainer.masters = None
            _watch_step(trainer)
        seed_everything(trainer.config.train.seed + trainer.context.rank)
        self.inputs.logger.begin()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.inputs.logger.begin_steps()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.rate = self.inputs.plan.learning_rate(state.global_step)
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = self.rate

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        if self.trainer.config.strategy.name != "deepspeed":
            self.inputs.logger.allocator.before_update()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        assert trainer.step is not None
        total = torch.stack(trainer.shares).sum(dim=0)
        self.inputs.logger.step(trainer.step, total, torch.as_tensor(trainer.norm), self.rate)

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        inputs = self.inputs
        end_epoch(self.trainer.wrapped, inputs.training, inputs.evaluation, inputs.plan, inputs.logger)


def _watch_step(trainer: DistexpTrainer) -> None:
    """DeepSpeed steps within the Trainer's backward: what comes before a step has to be seen there.

    Stage 0 over fp32 weights clips without keeping the norm.
    """
    engine = trainer.model_wrapped
    step, allocator = engine.step, trainer.inputs.logger.allocator
    plain = ds_model.keeps_plain_gradients(trainer.config)

    def watched_step() -> None:
        allocator.before_update()
        if plain:
            engine._global_grad_norm = ds_model.unpartitioned_norm(engine)
        step()

    engine.step = watched_step

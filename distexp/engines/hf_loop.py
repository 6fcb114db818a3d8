"""``transformers.Trainer`` with the data, optimizer, loss and metrics of distexp."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from distexp.config import Config, custom_code
from distexp.data.base import Batch
from distexp.data.loader import StepData
from distexp.distributed.context import Context
from distexp.engines.base import check_built
from distexp.engines.hf_adapters import HFAdapter
from distexp.models.blueprint import Blueprint
from distexp.models.objective import loss_sum, partial_metrics
from distexp.runs.record_sections import Built
from distexp.strategies import fsdp_units, torch_model
from distexp.strategies.base import load_strategy
from distexp.strategies.optimizer import clip_gradients, innermost_optimizer
from distexp.strategies.torch_model import describe as describe_torch
from distexp.strategies.zero.ds_initialization import describe as describe_deepspeed
from distexp.system.seeding import seed_everything
from distexp.training.inputs import TrainingInputs
from distexp.training.loop import end_epoch


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
        self.adapter: HFAdapter = custom_code.locate(target)(blueprint, config, context)
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
            self.optimizer = self.own_optimizer = self.adapter.build_optimizer(self.model if model is None else model)
        return self.optimizer

    def training_step(self, model: nn.Module, *arguments: Any, **keywords: Any) -> Tensor:
        """Run one micro-batch."""
        self.inputs.logger.watchers.start_forward()
        loss: Tensor = super().training_step(model, *arguments, **keywords)
        return loss

    def _loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        """Return this rank's part of the mean loss. The Trainer corrects for the averaging of gradients over ranks."""
        assert self.step is not None, "the Trainer fetches a step first"
        inputs = self.step.micro_batches[len(self.contributions)].inputs
        batch = Batch(inputs, labels, num_samples=0, num_targets=0, num_tokens=0)  # loss_sum reads no counts
        loss = loss_sum(self.task, outputs, batch) / num_items_in_batch
        self.contributions.append(partial_metrics(self.task, outputs, batch, loss, num_items_in_batch))
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip as the native loop does. On a CPU, torch's norm has only five correct digits."""
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


class TrainingCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """A callback that does at the same points what the native loop does: logging, learning rate and evaluation."""

    def __init__(self, trainer: DistexpTrainer, model: HFEvaluableModel) -> None:
        self.trainer, self.model, self.inputs = trainer, model, trainer.inputs
        self.built: Built | None = None  # what the Trainer built; None before ``train``
        self.learning_rate = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Check what was built, and start the measurements."""
        trainer = self.trainer
        self.built = self.model.describe()
        check_built(self.built, trainer.strategy.expected_build(trainer.config))
        if innermost_optimizer(trainer.optimizer) is not trainer.own_optimizer:
            raise RuntimeError(f"the Trainer replaced the optimizer of distexp by {self.built.optimizer}")
        trainer.adapter.start(trainer)
        optimizer = getattr(trainer.model_wrapped, "optimizer", trainer.optimizer)
        self.inputs.logger.follow(trainer.model_wrapped, optimizer)
        seed_everything(trainer.config.train.seed + trainer.context.rank)
        self.inputs.logger.start()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Start the step clock."""
        self.inputs.logger.start_steps()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the learning rate of the step."""
        self.learning_rate = self.inputs.plan.learning_rate(state.global_step)
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = self.learning_rate

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Measure the memory before the update."""
        if not self.trainer.adapter.steps_itself:  # otherwise the update is over, and HFAdapter.start observes it
            self.inputs.logger.watchers.before_update()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the step."""
        trainer = self.trainer
        assert trainer.step is not None
        total, norm = torch.stack(trainer.contributions).sum(dim=0), torch.as_tensor(trainer.gradient_norm)
        self.inputs.logger.record_step(trainer.step, total, norm, self.learning_rate)

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Evaluate, and record the epoch."""
        end_epoch(self.model, self.inputs)


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
        """Return what was built, read from the live objects. Raises RuntimeError if FSDP did not shard all units."""
        trainer, wrapped, engine = self.trainer, self.module, "hf_trainer"
        if type(wrapped).__name__ == "DeepSpeedEngine":
            return describe_deepspeed(wrapped, trainer=engine)
        distribution = _distribution(wrapped, trainer.unwrapped, trainer.adapter.units)
        # accelerate replaces ``forward`` if it casts, and keeps the original in this attribute.
        casts = "_original_forward" in vars(trainer.unwrapped)
        autocast_dtype = torch_model.DTYPES[trainer.accelerator.mixed_precision] if casts else None
        optimizer, strategy = innermost_optimizer(trainer.optimizer), trainer.config.strategy.name
        return describe_torch(wrapped, optimizer, distribution, autocast_dtype, strategy=strategy, engine=engine)


class StepLoader:
    """The steps of an epoch, as a data loader for the Trainer. Its length is the number of micro-batches."""

    def __init__(self, inputs: TrainingInputs) -> None:
        self.inputs, self.epoch = inputs, 0

    def __len__(self) -> int:
        return len(self.inputs.training.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; the Trainer calls this before each epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[StepData]:
        remaining = self.inputs.plan.steps_of(self.epoch, self.inputs.logger.steps)
        return self.inputs.training.iter_steps(self.epoch, remaining)


# Environment variables of ``accelerate launch``, or of an earlier training in this process; they change a run.
CONFLICTING_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


def training_arguments(config: Config, context: Context, total_steps: int, adapter: HFAdapter) -> TrainingArguments:
    """Return the arguments of a run, and set accelerate's process-wide state."""
    train = config.train
    for name in [name for name in os.environ if name.startswith(CONFLICTING_PREFIXES)]:
        del os.environ[name]
    # Without this variable, accelerate would set the number of threads.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    with adapter.argument_context():
        arguments = TrainingArguments(
            output_dir=str(context.run_dir),
            per_device_train_batch_size=train.micro_batch,
            gradient_accumulation_steps=train.gradient_accumulation_steps,
            max_steps=total_steps,
            learning_rate=train.learning_rate,
            lr_scheduler_type="constant",  # on_step_begin sets the learning rate
            max_grad_norm=train.gradient_clipping or 0.0,
            seed=train.seed,
            bf16=adapter.precision == "bf16",
            fp16=adapter.precision == "fp16",
            use_cpu=context.device.type == "cpu",
            average_tokens_across_devices=True,
            # MetricsLogger writes the logs. The filter would wait for the device after every micro-batch.
            logging_strategy="no",
            logging_nan_inf_filter=False,
            save_strategy="no",
            eval_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **adapter.arguments(),
        )
    adapter.configure_arguments(arguments)
    return arguments


def _distribution(wrapped: nn.Module, model: nn.Module, units: Sequence[nn.Module]) -> torch_model.Distribution:
    if isinstance(wrapped, DistributedDataParallel):
        return torch_model.read_ddp_distribution(wrapped)
    if isinstance(wrapped, FSDPModule):
        missing = [unit for unit in units if not isinstance(unit, FSDPModule)]
        if missing:
            raise RuntimeError(f"FSDP did not shard {len(missing)} of {len(units)} blocks as separate units")
        # accelerate never reshards the root and the last unit after the forward pass; torch does the same by default.
        return fsdp_units.read_distribution(wrapped, units)
    return torch_model.Distribution("none" if wrapped is model else type(wrapped).__name__, mesh=[1, 1])

"""Logging, learning rate and evaluation of the native loop, as a callback of ``transformers.Trainer``."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from distexp.engines.base import check_built
from distexp.engines.hf_evaluable import HFEvaluableModel
from distexp.engines.hf_loop import DistexpTrainer
from distexp.runs.record_sections import Built
from distexp.strategies.model_tensors import innermost_optimizer
from distexp.system.seeding import seed_everything
from distexp.training.loop import end_epoch


class TrainingCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """A callback that does at the same points what the native loop does: logging, learning rate and evaluation.

    Attributes:
        built: what the Trainer built; None before ``train``.
    """

    def __init__(self, trainer: DistexpTrainer, model: HFEvaluableModel) -> None:
        self.trainer, self.model, self.inputs = trainer, model, trainer.inputs
        self.built: Built | None = None
        self.learning_rate = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Check what was built, and start the measurements."""
        trainer = self.trainer
        self.built = self.model.describe()
        self._check_built(self.built)
        trainer.adapter.start(trainer)
        optimizer = getattr(trainer.model_wrapped, "optimizer", trainer.optimizer)
        self.inputs.logger.follow(trainer.model_wrapped, optimizer)
        seed_everything(trainer.config.train.seed + trainer.context.rank)
        self.inputs.logger.start()

    def _check_built(self, built: Built) -> None:
        """Raise RuntimeError if the model or the optimizer is not the requested one."""
        trainer = self.trainer
        check_built(built, trainer.strategy.expected_build(trainer.config))
        if innermost_optimizer(trainer.optimizer) is not trainer.own_optimizer:
            raise RuntimeError(f"the Trainer replaced the optimizer of distexp by {built.optimizer}")

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
        total = torch.stack(trainer.contributions).sum(dim=0)
        self.inputs.logger.record_step(trainer.step, total, torch.as_tensor(trainer.gradient_norm), self.learning_rate)

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Evaluate, and record the epoch."""
        end_epoch(self.model, self.inputs)

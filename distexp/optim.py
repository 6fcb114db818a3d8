"""The optimizer and the schedule of learning rates: the same arithmetic for every strategy."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distexp.config import TrainConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases and the scales of norms do not, as in the Trainer."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if _dimensions(p) >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if _dimensions(p) < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _dimensions(parameter: nn.Parameter) -> int:
    """A parameter's axes; one that ZeRO-3 has partitioned is flat and keeps its shape beside it."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def build_optimizer(model: nn.Module, train: TrainConfig, *, fused: bool) -> torch.optim.Optimizer:
    """AdamW or SGD over a model as it is now; the loop sets the learning rate before each step."""
    groups = parameter_groups(model, train.weight_decay)
    if train.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=train.learning_rate, momentum=train.momentum, fused=fused)
    beta1, beta2 = train.betas
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=(beta1, beta2), eps=train.eps, fused=fused)


def learning_rate(train: TrainConfig, step: int, *, total_steps: int, steps_per_epoch: int) -> float:
    """The learning rate of a step, counted from 0.

    linear: up over ``warmup_steps``, then down to zero at ``total_steps`` (the Trainer's default);
    step: times ``gamma`` every ``step_size`` epochs (StepLR); constant. All warm up alike.
    """
    if step < train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    if train.schedule == "linear":
        left = (total_steps - step) / max(1, total_steps - train.warmup_steps)
        return train.learning_rate * max(0.0, left)
    if train.schedule == "step":
        return float(train.learning_rate * train.gamma ** (step // steps_per_epoch // train.step_size))
    return train.learning_rate

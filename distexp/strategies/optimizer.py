"""The optimizer and the schedule of learning rates: the same arithmetic for every strategy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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
    """AdamW or SGD over a model as it is now; the loop sets the learning rate before each step.

    Args:
        fused: for AdamW. When the loss scale of fp16 skips the first step, torch's fused SGD leaves its momentum
            uninitialised and goes on from that: ResNet-50 diverged by it.
    """
    groups = parameter_groups(model, train.weight_decay)
    if train.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=train.learning_rate, momentum=train.momentum)
    beta1, beta2 = train.betas
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=(beta1, beta2), eps=train.eps, fused=fused)


@contextmanager
def own_hyperparameters(groups: list[dict[str, Any]]) -> Iterator[None]:
    """Puts back the groups' hyperparameters, which a loaded state brings along."""
    own = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    yield
    for group, values in zip(groups, own, strict=True):
        group.update(values)


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float | None) -> Tensor:
    """Scales all gradients down to a global norm of ``limit``; the norm before that.

    Shards are measured where they are, and one number is reduced over the ranks that share them.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    # A CPU adds up in one long row, which costs float32 five digits of seven; a GPU adds up in a tree.
    dtype = torch.float64 if local[0].device.type == "cpu" else torch.float32
    norm: Tensor = torch.stack(torch._foreach_norm(local, 2, dtype=dtype)).norm(2)
    first = gradients[0]
    if isinstance(first, DTensor):
        squared = norm.square()
        for axis, placement in enumerate(first.placements):
            if placement.is_shard():
                dist.all_reduce(squared, group=first.device_mesh.get_group(axis))
        norm = squared.sqrt()
    if limit is not None:
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(local, scale.to(local[0].dtype))
    return norm.to(torch.float32)


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

"""The optimizer and the gradient clipping: the same arithmetic for every strategy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distexp.config import TrainConfig
from distexp.system.torch_internals.tensors import scale_tensors, tensor_norms


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the optimizer groups: weight decay for matrices only, as in the Trainer."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if _dimensions(p) >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if _dimensions(p) < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _dimensions(parameter: nn.Parameter) -> int:
    """Return the number of axes; ZeRO-3 keeps the shape in ``ds_shape``."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def build_optimizer(model: nn.Module, train: TrainConfig, *, fused: bool) -> torch.optim.Optimizer:
    """Build AdamW, on request with its fused kernel, or SGD; the loop sets the learning rate before each step.

    If fp16's loss scaling skips the first step, fused SGD leaves the momentum uninitialized. ResNet-50 diverged by it.
    """
    groups = parameter_groups(model, train.weight_decay)
    if train.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=train.learning_rate, momentum=train.momentum)
    beta1, beta2 = train.betas
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=(beta1, beta2), eps=train.eps, fused=fused)


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def add_missing_states(optimizer: torch.optim.Optimizer) -> None:
    """Give states of 0 to parameters that no step has updated, because they had no gradient.

    torch can only load a checkpoint in which all parameters have states. A step from states of 0 is a first step.
    """
    known = next(((parameter, state) for parameter, state in optimizer.state.items() if state), None)
    if known is None:
        return
    shape, example = known[0].shape, known[1]
    for parameter in trained_parameters(optimizer):
        if not optimizer.state.get(parameter):
            optimizer.state[parameter] = {
                name: torch.zeros_like(parameter if value.shape == shape else value)
                for name, value in example.items()
                if isinstance(value, Tensor)
            }


@contextmanager
def keep_hyperparameters(optimizer: Any) -> Iterator[None]:
    """Restore the hyperparameters of an optimizer after the block, which loads the state of another run."""
    names = ("lr", "weight_decay", "betas", "eps", "momentum")  # set by the configuration; others choose the kernels
    saved = [{key: group[key] for key in names if key in group} for group in optimizer.param_groups]
    yield
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        group.update(values)


def restore_kernel(optimizer: torch.optim.Optimizer, *, fused: bool | None) -> None:
    """Let an optimizer with a loaded state use its own kernel, and not that of the run that saved the state.

    torch's fused kernel reads the step counts on the device of the weights, and the others on the CPU.
    """
    for group in optimizer.param_groups:
        if "fused" in group:
            group["fused"] = fused
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "step" in state:
                state["step"] = state["step"].to(parameter.device if fused else "cpu")


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float | None) -> Tensor:
    """Scale the gradients to a norm of at most ``limit``; return the norm before, fp32, shape ()."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = gradient_norm(gradients)
    if limit is not None:
        local = _local(gradients)
        scale_tensors(local, clipping_scale(norm, limit).to(local[0].dtype))
    return norm.to(torch.float32)


def clipping_scale(norm: Tensor, limit: float) -> Tensor:
    """Return the factor that scales gradients of this norm to a norm of at most ``limit``."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients, shape ().

    Each rank computes the norm of its shards. One number is reduced over the ranks that share the shards.
    """
    local = _local(gradients)
    # A CPU adds the squares one after the other, so float32 would keep two of seven digits. A GPU adds them as a tree.
    dtype = torch.float64 if local[0].device.type == "cpu" else torch.float32
    norm: Tensor = torch.stack(tensor_norms(local, dtype)).norm(2)
    first = gradients[0]
    if isinstance(first, DTensor):
        squared = norm.square()
        for axis, placement in enumerate(first.placements):
            if placement.is_shard():
                dist.all_reduce(squared, group=first.device_mesh.get_group(axis))
        norm = squared.sqrt()
    return norm


def _local(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the part of each gradient that this rank has."""
    return [g.to_local() if isinstance(g, DTensor) else g for g in gradients]

"""Arithmetic of recorded tensors: distances, norms, an update of the optimizer, and fits."""

from collections.abc import Mapping, Sequence
from math import isnan, sqrt
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]  # by the name of the parameter or the buffer before the model was distributed


def distance(left: Tensor, right: Tensor) -> float:
    """Return the largest difference between two tensors; infinite for other shapes, or if one is not a number."""
    if left.shape != right.shape:
        return float("inf")
    found = (left - right).abs().max().item() if left.numel() else 0.0
    return found if not isnan(found) else float("inf")


def largest(tensor: Tensor) -> float:
    """Return the largest absolute value of a tensor."""
    return tensor.abs().max().item() if tensor.numel() else 0.0


def relative(value: float, expected: float) -> float:
    """Return the relative difference of two numbers; infinite if one is not a number."""
    found = abs(value - expected) / max(abs(expected), 1e-12)
    return found if not isnan(found) else float("inf")


def differs(value: Any, expected: Any) -> float:
    """Return the largest relative difference of two hyperparameters, which may be lists."""
    if value is None or expected is None:
        return float(value is not expected)
    left, right = ([each] if isinstance(each, float) else list(each) for each in (value, expected))
    return max((relative(a, b) if a != b else 0.0 for a, b in zip(left, right, strict=True)), default=0.0)


def global_norm(tensors: Tensors) -> float:
    """Return the 2-norm of all tensors together."""
    return sqrt(sum(float(each.double().square().sum()) for each in tensors.values()))


def by_parameter(groups: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the hyperparameters of each parameter by its name."""
    return {name: group for group in groups for name in group["names"]}


def updated(weight: Tensor, gradient: Tensor, states: Tensors, group: Mapping[str, Any], step: int) -> Tensor:
    """Return a weight after an update by AdamW or SGD."""
    rate, decay = group["lr"], group.get("weight_decay", 0.0)
    if "betas" not in group or "eps" not in group:
        direction = gradient + decay * weight
        if momentum := group.get("momentum", 0.0):
            buffer = states.get("momentum_buffer")
            direction = direction if buffer is None else momentum * buffer + direction
        plain: Tensor = weight - rate * direction
        return plain
    first, second = group["betas"]
    zero = torch.zeros_like(weight)
    mean = first * states.get("exp_avg", zero) + (1 - first) * gradient
    square = second * states.get("exp_avg_sq", zero) + (1 - second) * gradient.square()
    root = (square / (1 - second**step)).sqrt() + group["eps"]
    new: Tensor = weight * (1 - rate * decay) - rate / (1 - first**step) * mean / root
    return new


def flat(tensors: Tensors, names: Sequence[str]) -> Tensor:
    """Return some tensors as one vector in float64."""
    return torch.cat([tensors[name].flatten().double() for name in names])


def least_squares(columns: Sequence[Tensor], target: Tensor) -> tuple[list[float], float]:
    """Return the coefficients with which columns add up to a target, and the relative residual. Empty columns get 0."""
    sizes = [float(column.norm()) for column in columns]
    used = [position for position, size in enumerate(sizes) if size > 1e-9 * max(sizes)]
    if not used:
        return [0.0] * len(columns), 1.0
    matrix = torch.stack([columns[position] / sizes[position] for position in used], dim=1)
    solution = torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0]
    residual = float((target - matrix @ solution).norm() / target.norm().clamp(min=1e-60))
    found = dict(zip(used, solution.tolist(), strict=True))
    return [found.get(position, 0.0) / (sizes[position] or 1.0) for position in range(len(columns))], residual


def with_zeros(tensors: Tensors, like: Tensors) -> Tensors:
    """Return tensors with zeros for names that have none."""
    return {name: tensors.get(name, torch.zeros_like(each)) for name, each in like.items()}


def scale_of(found: Tensor, right: Tensor) -> float:
    """Return the factor by which a tensor is a multiple of another one."""
    left, other = found.flatten().double(), right.flatten().double()
    return float(left @ other / (other @ other).clamp(min=1e-60))

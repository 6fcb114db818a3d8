"""Arithmetic of recorded tensors: distances, norms, an update of the optimizer, and fits."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isnan
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


def explain_update(
    wrong: Sequence[str],
    *,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    expected: Tensors,
    changes: Tensors,
    groups: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Return what a wrong update is made of: multiples of the right one, of the gradient and of the weight."""
    change, right = flat(changes, wrong), flat(expected, wrong)
    moved = largest(change) > 1e-3 * largest(right)
    detail = {"skipped": not moved, "ratio": float(change @ right / (right @ right).clamp(min=1e-60))}
    trained = [name for name in wrong if name in after["gradients"] and groups.get(name, {}).get("lr")]
    if trained and "betas" not in groups[trained[0]] and not groups[trained[0]].get("momentum"):
        rates = {name: groups[name]["lr"] for name in trained}
        columns = [
            torch.cat([-rates[name] * source[name].flatten().double() for name in trained])
            for source in (after["gradients"], before["weights"])
        ]
        solution, residual = least_squares(columns, flat(changes, trained))
        detail |= {"gradient_factor": solution[0], "weight_factor": solution[1], "residual": residual}
    return detail | {"unchanged": [name for name in wrong if largest(changes[name]) == 0]}


def explain_gradients(
    names: Sequence[str], found: Tensors, right: Tensors, sums: Sequence[Tensors], earlier: Tensors | None
) -> dict[str, Any]:
    """Return what wrong gradients are made of: multiples of the right ones, or of those of each micro-batch.

    ``sums`` has the right gradients after each micro-batch. ``earlier`` has the wrong ones of the step before.
    """
    every = [name for name in right if name in found]
    names = [name for name in names if name in every]
    detail: dict[str, Any] = {"parameters": len(right), "order": every}
    if not names:
        return detail
    whole, wrong = flat(right, names), flat(found, names)
    scale = float(wrong @ whole / (whole @ whole).clamp(min=1e-60))
    detail |= {"scale": scale, "scale_residual": float((wrong - scale * whole).norm() / wrong.norm().clamp(min=1e-60))}
    detail["scales"] = {name: scale_of(found[name], right[name]) for name in names[:50]}
    detail["rounded"] = all(torch.equal(found[name], found[name].bfloat16().float()) for name in names)
    if not sums:
        return detail
    parts = [flat(with_zeros(sums[0], found), names)]
    complete = [with_zeros(each, found) for each in sums]
    parts += [flat(after, names) - flat(before, names) for before, after in pairwise(complete)]
    previous = [flat(with_zeros(earlier, found), names)] if earlier is not None else []
    solution, residual = least_squares([*parts, *previous], wrong)
    previous_part = solution[-1] if previous else 0.0
    return detail | {"parts": solution[: len(parts)], "previous": previous_part, "residual": residual}

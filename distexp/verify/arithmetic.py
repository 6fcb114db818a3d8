"""Arithmetic of recorded tensors: distances, norms, an update of the optimizer, and fits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isnan
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from distexp.config import ConfigError
from distexp.exceptions import first_line
from distexp.models.dropout import dropout_rates
from distexp.system.seeding import equal_states, restore_rng, rng_state

EPS = 2.0**-23  # relative distance of two numbers in fp32
Tensors = dict[str, Tensor]  # by the name of the parameter or the buffer before the model was distributed


def distance(left: Tensor, right: Tensor, order: float = float("inf")) -> float:
    """Return the norm of a difference of tensors, by default the largest; infinite for other shapes or NaN."""
    if left.shape != right.shape:
        return float("inf")
    found = float(torch.linalg.vector_norm(left - right, order)) if left.numel() else 0.0
    return found if not isnan(found) else float("inf")


def largest(tensor: Tensor) -> float:
    """Return the largest absolute value of a tensor."""
    return tensor.abs().max().item() if tensor.numel() else 0.0


PASSES = 16
"""Repetitions of a forward pass that draws random numbers. One may draw the same, such as which layers to skip."""


KINKS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU)


def make_smooth(model: nn.Module) -> None:
    """Replace ReLU by GELU and max pooling by average pooling in all modules.

    Rounding can change the sign of a value near zero, or which of two values is the maximum. Then gradients differ by
    far more than by rounding, and no second reference shows by how much, because it has other such values.
    """
    for parent in model.modules():
        for name, child in parent._modules.items():
            if type(child) in KINKS:
                parent._modules[name] = nn.GELU()
            elif isinstance(child, nn.MaxPool1d | nn.MaxPool2d) and child.dilation == 1 and not child.return_indices:
                pool: Any = nn.AvgPool1d if isinstance(child, nn.MaxPool1d) else nn.AvgPool2d
                parent._modules[name] = pool(child.kernel_size, child.stride, child.padding, ceil_mode=child.ceil_mode)


class RepeatCheck:
    """Check of the forward passes of a training: one raises ConfigError if repetitions of it have other results.

    The first pass is repeated, and the first one that draws random numbers. Such a training depends on how many
    micro-batches a step has, so no bound follows from the noise run.
    """

    def __init__(self, model: nn.Module, floor: float, device: torch.device) -> None:
        self.floor, self.device = floor, device
        self._is_first, self._draws, self._is_repeating = True, False, False
        self._given: Any = None  # the inputs, which a forward pass may change, and the random states before it
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after, with_kwargs=True)

    def _before(self, module: nn.Module, *inputs: Any) -> None:
        if module.training and not self._is_repeating:
            self._given = _copied(inputs), rng_state(self.device)

    def _after(self, module: nn.Module, *given: Any) -> None:
        if not module.training or self._is_repeating:
            return
        (inputs, before), after, outputs = self._given, rng_state(self.device), given[-1]
        draws = not self._draws and not equal_states(before, after)
        passes = PASSES if draws else int(self._is_first)
        self._is_first, self._draws, self._is_repeating = False, self._draws or draws, True
        try:
            error = max((self._repeat(module, inputs, outputs) for _ in range(passes)), default=0.0)
        finally:
            self._is_repeating = False
            restore_rng(after, self.device)
        if error > self.floor:
            key = next((f", by model.options.{name}=0" for name in dropout_rates(module)), "")
            raise ConfigError(
                f"{type(module).__name__} has other outputs in a second forward pass of a batch in training, by "
                f"{error:.0e} of the largest: it draws random numbers (such as dropout by a function), or its buffers "
                "change what it computes. Such a training depends on the number of workers by design: "
                f"switch that off{key}"
            )

    def _repeat(self, module: nn.Module, inputs: Any, outputs: Any) -> float:
        """Return how much the outputs of a repetition differ, which leaves the buffers as they are."""
        copies = {name: buffer.clone() for name, buffer in module.named_buffers()}
        arguments, options = _copied(inputs)
        try:
            again = torch.func.functional_call(module, copies, arguments, options)
        except Exception as error:  # any: a model may allow one forward pass before each backward pass
            print(f"note: not checked whether {type(module).__name__} repeats: {first_line(error)}", flush=True)
            return 0.0
        pairs = zip(_results(outputs), _results(again), strict=False)
        return max((_change(first, second) for first, second in pairs), default=0.0)


def _copied(inputs: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs)


def _results(outputs: Any) -> list[Tensor]:
    """Return the tensors of real numbers in the outputs of a model, which may be an object with attributes."""
    leaves: list[Any] = []
    for leaf in tree_leaves(outputs):
        leaves += [leaf] if isinstance(leaf, Tensor) else tree_leaves(getattr(leaf, "__dict__", None))
    return [each.detach() for each in leaves if isinstance(each, Tensor) and each.is_floating_point()]


def _change(first: Tensor, second: Tensor) -> float:
    """Return the largest difference as a share of the largest finite value. Equal infinities do not differ."""
    differ = ~torch.isclose(first, second, rtol=0.0, atol=0.0, equal_nan=True)
    scale = largest(first[first.isfinite()])
    return distance(second[differ], first[differ]) / max(scale, 1e-30) if differ.any() else 0.0


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
    if not group.get("decoupled_weight_decay", True) and "betas" in group:  # as Adam does
        gradient, decay = gradient + decay * weight, 0.0
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


MULTIPLE = 0.02
"""By how much of its largest value a tensor may differ from a multiple of another one."""

WRONG_FORMULAS = {
    "old_norm": "the gradients are clipped by the norm of the step before",
    "decay_in_gradient": "the weight decay is added to the gradient (as Adam does), not to the weight (as AdamW does)",
    "no_decay": "there is no weight decay",
    "no_bias_correction": "the averages of AdamW are used without bias correction",
    "no_states": "the optimizer states of earlier steps are not used",
    "not_clipped": "",  # explained by the norm
}
"""Wrong formulas of an update that are tried, with what they mean."""


def share_of_zeros(found: Tensor, right: Tensor, bound: float) -> float:
    """Return the share of the values that are wrongly 0; 0 if others are wrong too."""
    zero = (found == 0) & (right != 0)
    return float(zero.double().mean()) if largest((found - right)[~zero]) <= bound * largest(right) else 0.0


@dataclass(frozen=True)
class Update:
    """What the update of a parameter is computed from, and what it became."""

    old: Tensor
    new: Tensor
    gradient: Tensor | None  # before clipping
    factor: float  # by which the gradient is clipped
    states: Tensors  # before the update
    group: Mapping[str, Any]
    step: int  # from 1

    def expected(self) -> Tensor:
        """Return the right new weight."""
        if self.gradient is None:
            return self.old
        return updated(self.old, self.gradient * self.factor, self.states, self.group, self.step)

    def wrong_formulas(self, old_factor: float) -> dict[str, Tensor]:
        """Return the new weight by common wrong formulas. The other factor is that of the step before."""
        if self.gradient is None:
            return {}
        decay = self.group.get("weight_decay", 0.0)
        bare = replace(self, group={**self.group, "weight_decay": 0.0})
        found = {
            "not_clipped": replace(self, factor=1.0),
            "old_norm": replace(self, factor=old_factor),
            "no_decay": bare,
            "decay_in_gradient": replace(bare, gradient=self.gradient + decay / self.factor * self.old),
            "no_bias_correction": replace(self, step=10**6),
            "no_states": replace(self, states={}, step=1),
        }
        return {name: each.expected() for name, each in found.items()}


def explain_update(updates: Mapping[str, Update], old_factor: float, bound: float) -> dict[str, Any]:
    """Return what wrong updates are made of: multiples of the right ones, of the gradients and of the weights."""
    changes = {name: each.new - each.old for name, each in updates.items()}
    expected = {name: each.expected() - each.old for name, each in updates.items()}
    change, right = flat(changes, list(updates)), flat(expected, list(updates))
    detail: dict[str, Any] = {
        "skipped": largest(change) <= 1e-3 * largest(right),
        "ratio": scale_of(change, right),
        "unchanged": share_of_zeros(change, right, bound),
        "formula": _formula(updates, old_factor, bound),
    }
    trained = {name: each for name, each in updates.items() if each.gradient is not None and each.group.get("lr")}
    if trained and not any("betas" in each.group or each.group.get("momentum") for each in trained.values()):
        scaled = {name: -each.group["lr"] * each.old for name, each in trained.items()}
        sources = {
            name: -each.group["lr"] * each.gradient for name, each in trained.items() if each.gradient is not None
        }
        columns = [flat(each, list(trained)) for each in (sources, scaled)]
        solution, residual = least_squares(columns, flat(changes, list(trained)))
        detail |= {"gradient_factor": solution[0], "weight_factor": solution[1], "residual": residual}
    return detail


def _formula(updates: Mapping[str, Update], old_factor: float, bound: float) -> str | None:
    """Return the wrong formula by which all updates are right."""
    fits = set(WRONG_FORMULAS)
    for each in updates.values():
        scale = bound * largest(each.new - each.old) + 8 * EPS * largest(each.old)
        fits &= {name for name, new in each.wrong_formulas(old_factor).items() if distance(each.new, new) <= scale}
    return next((name for name in WRONG_FORMULAS if name in fits), None)


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
    scale = scale_of(wrong, whole)
    detail |= {"scale": scale, "scale_residual": float((wrong - scale * whole).norm() / wrong.norm().clamp(min=1e-60))}
    detail["scales"] = {name: scale_of(found[name], right[name]) for name in names[:50]}
    detail["are_multiples"] = all(
        distance(found[name], scale * right[name]) < MULTIPLE * largest(found[name])
        for name, scale in detail["scales"].items()
    )
    detail["zeros"] = share_of_zeros(wrong, whole, 1e-4)
    detail["rounded"] = largest(wrong) > 0 and all(
        torch.equal(found[name], found[name].bfloat16().float()) for name in names
    )
    if not sums:
        return detail
    parts = [flat(with_zeros(sums[0], found), names)]
    complete = [with_zeros(each, found) for each in sums]
    parts += [flat(after, names) - flat(before, names) for before, after in pairwise(complete)]
    previous = [flat(with_zeros(earlier, found), names)] if earlier is not None else []
    solution, residual = least_squares([*parts, *previous], wrong)
    return detail | {"parts": solution[: len(parts)], "previous": sum(solution[len(parts) :]), "residual": residual}

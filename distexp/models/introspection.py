"""Inspection of models: repeated blocks, embeddings, limits and FLOPs.

See also ``distexp.resolve.parameter_count``, which counts parameters from the configuration alone, and
``distexp.measure.flops``, which derives the FLOPs of training from those of the forward pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from distexp.config import ConfigError
from distexp.data.base import LOGITS_TO_KEEP
from distexp.models.objective import get_logits

NamedModules = list[tuple[str, nn.Module]]
"""Modules with their names in ``named_modules``."""


def find_blocks(model: nn.Module, wrap: str = "auto", *, needed_for: str, alternative: str) -> NamedModules:
    """Find the repeated blocks of a model, in forward order.

    Args:
        model: any module.
        wrap: as in ``find_units``.
        needed_for: the settings that need blocks, for the message.
        alternative: what to set instead, for the message.

    Raises:
        ConfigError: the model has no module of these classes, or no repeated blocks.
    """
    blocks = find_units(model, wrap)
    if not blocks:
        raise ConfigError(
            f"{needed_for} needs a model with repeated blocks, which {type(model).__name__} lacks: set {alternative}, "
            "or fsdp.wrap to class names of its modules"
        )
    return blocks


def find_units(model: nn.Module, wrap: str = "auto") -> NamedModules:
    """Find the repeated blocks of a model, in forward order; ``auto`` finds none in a model without them.

    Args:
        model: any module.
        wrap: class names separated by commas, or ``auto``. ``auto`` finds the classes in
            ``_no_split_modules`` of transformers, or else the members of containers whose members have the
            same class. Of several such classes, it takes the one with the most parameters.

    Raises:
        ConfigError: the model has no module of these classes.
    """
    if wrap != "auto":
        return _find_classes(model, [name.strip() for name in wrap.split(",") if name.strip()])
    declared = set(getattr(model, "_no_split_modules", None) or ())
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ in declared]
    return found or _largest_repeated(model)


def find_embeddings(model: nn.Module) -> NamedModules:
    """Find the token embedding and the output head; empty for image models."""
    getters = (getattr(model, f"get_{side}_embeddings", None) for side in ("input", "output"))
    modules = [getter() for getter in getters if getter is not None]
    names = {id(module): name for name, module in model.named_modules()}
    return [(names[id(module)], module) for module in modules if module is not None]


def has_tied_embeddings(model: nn.Module) -> bool:
    """Return whether the token embedding and the output head share one weight."""
    weights = [module.weight for _, module in find_embeddings(model)]
    return len(weights) == 2 and weights[0] is weights[1]


def max_positions(model: nn.Module) -> int | None:
    """Return the maximum sequence length in tokens; None if unlimited (ALiBi).

    Args:
        model: distexp's GPT or a model of transformers. It may be wrapped, with the model as ``module``.
    """
    bare = getattr(model, "module", model)
    positions = getattr(bare, "positions", None)
    if isinstance(positions, nn.Embedding):
        return positions.num_embeddings
    limit = getattr(_text_config(bare), "max_position_embeddings", None)
    return None if limit is None else int(limit)


def read_attention(model: nn.Module) -> str | None:
    """Return the implementation of the attention, for example ``sdpa``; None if the model does not declare it.

    Args:
        model: a model of distexp or transformers. It may be wrapped, with the model as ``module``.
    """
    bare = getattr(model, "module", model)
    declared = getattr(bare, "attention_implementation", None)
    if declared is None:
        declared = getattr(_text_config(bare), "_attn_implementation", None)
    return None if declared is None else str(declared)


def _text_config(model: nn.Module) -> Any:
    """Return the configuration of a model of transformers; None for others, whose ``config`` may be anything."""
    read = getattr(getattr(model, "config", None), "get_text_config", None)
    return None if read is None else read()


def supports_logits_to_keep(model: nn.Module) -> bool:
    """Return whether a model can compute a part of its logits.

    Args:
        model: a model. It may be wrapped, with the model as ``module``.
    """
    return LOGITS_TO_KEEP in signature(getattr(model, "module", model).forward).parameters


def check_forward_arguments(model: nn.Module, inputs: Iterable[str]) -> None:
    """Raise ConfigError if the ``forward`` of a model cannot be called with these keyword arguments."""
    names = list(inputs)
    arguments = signature(model.forward)
    try:
        arguments.bind(**dict.fromkeys(names))
    except TypeError as error:
        raise ConfigError(
            f"{type(model).__name__}.forward({', '.join(arguments.parameters)}) cannot take the inputs of the dataset "
            f"({error}): its arguments must be {', '.join(names)}"
        ) from error


def count_forward_flops(model: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """Count the floating point operations of one forward pass.

    A multiply-add counts as two.

    Args:
        model: a copy on the meta device, which takes no memory and no time. Do not use it afterwards,
            because its attention implementation is changed.
        inputs: its keyword arguments, on any device; only the shapes matter.
    """
    with torch.no_grad():
        return _count_flops(lambda: _run_on_meta(model, inputs))


def count_training_flops(model: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """Count the floating point operations of one forward and one backward pass, with what they recompute.

    Args:
        model: as for ``count_forward_flops``.
        inputs: as for ``count_forward_flops``.
    """

    def run() -> None:
        get_logits(_run_on_meta(model, inputs)).sum().backward()  # type: ignore[no-untyped-call]

    return _count_flops(run)


def _count_flops(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def _run_on_meta(model: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
    set_attention = getattr(model, "set_attn_implementation", None)
    if set_attention is not None:
        # The other implementations read the values of the mask, which a meta tensor lacks. The FLOPs are the same.
        set_attention("eager")
    return model(**{name: tensor.to("meta") for name, tensor in inputs.items()})


def _find_classes(model: nn.Module, wanted: list[str]) -> NamedModules:
    parts = [(name, module, type(module).__name__) for name, module in model.named_modules() if name]
    available = {kind for _, _, kind in parts}
    missing = set(wanted) - available
    if missing or not wanted:
        problem = f"the model has no modules of class {', '.join(sorted(missing))}" if missing else "no class is given"
        raise ConfigError(
            f"fsdp.wrap={','.join(wanted)}: {problem}. Use auto, or some of {', '.join(sorted(available))}"
        )
    return [(name, module) for name, module, kind in parts if kind in wanted]


def _largest_repeated(model: nn.Module) -> NamedModules:
    by_class: dict[type[nn.Module], NamedModules] = defaultdict(list)
    for name, container in model.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        members = list(container.named_children())
        classes = {type(member) for _, member in members}
        all_have_children = all(any(True for _ in member.children()) for _, member in members)
        if len(classes) == 1 and all_have_children:
            prefix = f"{name}." if name else ""
            by_class[classes.pop()] += [(prefix + child, member) for child, member in members]
    return max(by_class.values(), key=_count_parameters, default=[])


def _count_parameters(modules: NamedModules) -> int:
    return sum(parameter.numel() for _, module in modules for parameter in module.parameters())

"""The parts of a model that strategies treat apart: repeated blocks, embeddings and head."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from inspect import signature

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from distexp.config import ConfigError
from distexp.data.base import LOGITS_TO_KEEP

Named = list[tuple[str, nn.Module]]


def find_blocks(model: nn.Module, wrap: str = "auto") -> Named:
    """The repeated blocks of a model in forward order, named as in ``named_modules``.

    Args:
        model: any module.
        wrap: ``auto``: what Hugging Face's ``_no_split_modules`` names, else the members of those containers
            whose members share a class; of several such classes, the one with the most parameters.
            Otherwise class names separated by commas.

    Raises:
        ConfigError: no such class in this model, or no repeated blocks.
    """
    if wrap != "auto":
        return _of_classes(model, [name.strip() for name in wrap.split(",") if name.strip()])
    declared = set(getattr(model, "_no_split_modules", None) or ())
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ in declared]
    return found or _repeated(model)


def find_embeddings(model: nn.Module) -> Named:
    """The token embedding and the output head, by the two methods of Hugging Face; empty for image models."""
    getters = (getattr(model, f"get_{side}_embeddings", None) for side in ("input", "output"))
    wanted = [getter() for getter in getters if getter is not None]
    names = {id(module): name for name, module in model.named_modules()}
    return [(names[id(module)], module) for module in wanted if module is not None]


def has_tied_embeddings(model: nn.Module) -> bool:
    """Whether token embedding and output head are one weight."""
    weights = [module.weight for _, module in find_embeddings(model)]
    return len(weights) == 2 and weights[0] is weights[1]


def max_positions(model: nn.Module) -> int | None:
    """Tokens of the longest sequence that a language model takes; None where nothing limits it, as with ALiBi.

    Args:
        model: our GPT or one of transformers, also inside a wrapper that calls it ``module``.
    """
    bare = getattr(model, "module", model)
    positions = getattr(bare, "positions", None)
    if isinstance(positions, nn.Embedding):
        return positions.num_embeddings
    settings = getattr(bare, "config", None)
    known = getattr(settings.get_text_config(), "max_position_embeddings", None) if settings is not None else None
    return None if known is None else int(known)


def supports_logits_to_keep(model: nn.Module) -> bool:
    """Whether a model, also inside a wrapper that calls it ``module``, can be asked for some of its logits."""
    return LOGITS_TO_KEEP in signature(getattr(model, "module", model).forward).parameters


def check_supports_logits_to_keep(model: nn.Module) -> None:
    """Raises ConfigError where a model gives all of its logits or none."""
    if not supports_logits_to_keep(model):
        raise ConfigError(
            f"train.logits=targets asks a model for some of its logits, and {type(model).__name__}.forward has no "
            f"{LOGITS_TO_KEEP}: leave it out"
        )


def count_forward_flops(model: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """Floating point operations of one forward pass, a multiplication and an addition counted apart.

    Args:
        model: a copy on the meta device, so that neither memory nor time is spent; not to be used again.
        inputs: its keyword arguments, on any device; only their shapes matter.
    """
    shapes = {name: tensor.to("meta") for name, tensor in inputs.items()}
    choose_attention = getattr(model, "set_attn_implementation", None)
    if choose_attention is not None:
        # transformers' other attentions look into the mask, which has no values here; the products are the same.
        choose_attention("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**shapes)
    return int(counter.get_total_flops())


def _of_classes(model: nn.Module, wanted: list[str]) -> Named:
    parts = [(name, module, type(module).__name__) for name, module in model.named_modules() if name]
    there = {kind for _, _, kind in parts}
    lacking = set(wanted) - there
    if lacking or not wanted:
        raise ConfigError(
            f"fsdp.wrap names {', '.join(sorted(lacking)) or 'nothing'}, which this model does not have: "
            f"choose auto, or from {', '.join(sorted(there))}"
        )
    return [(name, module) for name, module, kind in parts if kind in wanted]


def _repeated(model: nn.Module) -> Named:
    by_class: dict[type[nn.Module], Named] = defaultdict(list)
    for name, container in model.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        members = list(container.named_children())
        classes = {type(member) for _, member in members}
        composed = all(any(True for _ in member.children()) for _, member in members)
        if len(classes) == 1 and composed:
            prefix = f"{name}." if name else ""
            by_class[classes.pop()] += [(prefix + child, member) for child, member in members]
    if not by_class:
        raise ConfigError(
            f"{type(model).__name__} has no repeated blocks to treat apart: name their classes in fsdp.wrap"
        )
    return max(by_class.values(), key=_parameters)


def _parameters(modules: Named) -> int:
    return sum(parameter.numel() for _, module in modules for parameter in module.parameters())

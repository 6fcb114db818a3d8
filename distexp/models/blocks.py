"""Repeated blocks of a model: the units that are sharded, checkpointed and compiled."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from distexp.config import ConfigError

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

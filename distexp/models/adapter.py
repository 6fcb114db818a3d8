"""Low-rank adapters (LoRA) by ``peft``: which layers get them, and the folder of a trained adapter.

The layers are replaced inside of the model, which keeps its class and its ``forward``. So its blocks, its output head
and its inputs are found as without adapters, and every strategy distributes it as any other model. Only the
adapters require gradients.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distexp.config import AdapterConfig, Config, ConfigError
from distexp.config.model_checks import weights_source
from distexp.models.task_models import is_of_head
from distexp.models.transforms import find_units

ADAPTER = "default"
"""peft's name of the adapter. It is part of the names of its weights."""

SAVED_PREFIX = "base_model.model."
"""Start of the names in a saved adapter."""

PEFT_TASKS = {
    **{"causal_lm": "CAUSAL_LM", "seq2seq_lm": "SEQ_2_SEQ_LM"},
    **{"sequence_classification": "SEQ_CLS", "token_classification": "TOKEN_CLS"},
}
"""peft's names of tasks, by which it finds the class of the base."""

Linears = dict[str, nn.Module]


def add_adapter(model: nn.Module, config: Config) -> nn.Module:
    """Freeze a model and add the adapters of a configuration, if it has any; return the same model.

    The random numbers of the matrices A are the next ones of torch's generator; the matrices B are 0. Modules that are
    trained whole, as the head of a classifier, stay as they are. Raise ConfigError if no layer is a target, or peft
    does not support one.
    """
    adapter = config.adapter
    if not adapter.freezes_model:
        return model
    import peft

    source = weights_source(config.model) if config.model.init == "pretrained" else None
    whole, targets = find_whole_modules(model, config), find_targets(model, adapter, config.fsdp.wrap)
    layers = [model.get_submodule(name) for name in _matched([name for name, _ in model.named_modules()], targets)]
    weights = [weight for layer in layers if isinstance(weight := getattr(layer, "weight", None), Tensor)]
    largest = max((min(weight.shape) for weight in weights if weight.dim() == 2), default=adapter.rank)
    if adapter.rank > largest:
        raise ConfigError(
            f"adapter.rank={adapter.rank} is larger than any rank of a target's weights: use at most {largest}, as "
            f"adapter.rank={min(8, largest)}"
        )
    settings = peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=targets,
        task_type=PEFT_TASKS.get(config.model.task),
        base_model_name_or_path=source,
    )
    try:
        peft.inject_adapter_in_model(settings, model, adapter_name=ADAPTER)
    except ValueError as error:  # a layer of another kind, such as a norm
        raise ConfigError(
            f"adapter.targets={adapter.targets} names {', '.join(sorted({type(layer).__name__ for layer in layers}))}, "
            f"which peft does not support: use linear layers, as {_candidates(model, config.fsdp.wrap)}"
        ) from error
    for module in model.modules():
        if hasattr(module, "lora_A"):
            # The weights already have the type of the computation, or autocast casts them. peft would first cast the
            # inputs to fp32.
            module.cast_input_dtype_enabled = False  # type: ignore[assignment]
    for name in whole:
        model.get_submodule(name).requires_grad_()
    settings.modules_to_save = whole or None  # after the injection, so that peft does not make a second copy of them
    if adapter.base_dtype == "bf16":
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    return model


def find_targets(model: nn.Module, adapter: AdapterConfig, wrap: str) -> list[str]:
    """Return the ends of the names of the layers that get adapters. Raise ConfigError if there are none."""
    names = [name for name, _ in model.named_modules()]
    if adapter.targets is not None:
        missing = [target for target in adapter.targets if not _matched(names, [target])]
        if missing or not adapter.targets:
            problem = f"{type(model).__name__} has no layer {', '.join(missing)}" if missing else "no layer is named"
            raise ConfigError(f"adapter.targets={adapter.targets}: {problem}: use {_candidates(model, wrap)}")
        return adapter.targets
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as CHOSEN

    kind = getattr(getattr(model, "config", None), "model_type", None)
    chosen = [target for target in CHOSEN.get(str(kind), ()) if _matched(names, [target])]
    if not chosen and not (chosen := _ends(names, list(_linear_layers(model, wrap)))):
        raise ConfigError(
            f"adapter=lora needs linear layers in repeated blocks, but {type(model).__name__} has none: set "
            f"adapter.targets to names of its layers, or leave adapter out"
        )
    return chosen


def find_whole_modules(model: nn.Module, config: Config) -> list[str]:
    """Return the names of the modules that are trained and saved whole. Raise ConfigError if there are none."""
    adapter, names = config.adapter, [name for name, _ in model.named_modules() if name]
    if adapter.modules_to_save is not None:
        missing = [wanted for wanted in adapter.modules_to_save if not _matched(names, [wanted])]
        if missing or not adapter.modules_to_save:
            named = f"has no module {', '.join(missing)}" if missing else "was given no name"
            known = ",".join(name for name, _ in model.named_children())
            raise ConfigError(
                f"adapter.modules_to_save={adapter.modules_to_save}: {type(model).__name__} {named}: use some of "
                f"[{known}], or leave it out"
            )
        whole = _matched(names, adapter.modules_to_save)
        if tied := _tied_weights(model, whole):
            ends = [end for end in adapter.modules_to_save if any(f".{end}." in f".{name}" for name in tied)]
            targets = [*find_targets(model, adapter, config.fsdp.wrap), *ends]
            raise ConfigError(
                f"adapter.modules_to_save={adapter.modules_to_save}: {' and '.join(tied)} are one weight, which peft "
                f"cannot load from a saved adapter: leave it out, or use adapter.targets=[{','.join(targets)}]"
            )
        return whole
    heads = _head_modules(model) if config.model.traits.has_classes else []
    targets = _matched(names, adapter.targets or [])
    return [head for head in heads if not any(f"{target}.".startswith(f"{head}.") for target in targets)]


def _tied_weights(model: nn.Module, modules: list[str]) -> list[str]:
    """Return the names of the first weight that has several names, one of them in a module of ``modules``."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(weight, []).append(name)
    starts = tuple(f"{module}." for module in modules)
    return next((tied for tied in names.values() if len(tied) > 1 and any(n.startswith(starts) for n in tied)), [])


def _head_modules(model: nn.Module) -> list[str]:
    """Return the modules of a classifier whose weights are new, see ``is_of_head``; timm names its head itself."""
    if not hasattr(model, "base_model_prefix"):
        classifier: Any = getattr(model, "get_classifier", lambda: None)()
        return [name for name, module in model.named_modules() if module is classifier]
    weights = [name.split(".") for name, _ in model.named_parameters() if is_of_head(model, name)]
    ends = (parts.index("pooler") + 1 if "pooler" in parts else 1 for parts in weights)
    return list(dict.fromkeys(".".join(parts[:end]) for parts, end in zip(weights, ends, strict=True)))


def _linear_layers(model: nn.Module, wrap: str) -> Linears:
    """Return the linear layers of the blocks by name. GPT-2 has its own class of them, with transposed weights."""
    blocks = find_units(model, wrap)
    layers = ((f"{block}.{name}", layer) for block, module in blocks for name, layer in module.named_modules())
    return {name: layer for name, layer in layers if isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"}


def _matched(names: list[str], ends: list[str]) -> list[str]:
    return [name for name in names if any(name == end or name.endswith(f".{end}") for end in ends)]


def _ends(names: list[str], wanted: list[str]) -> list[str]:
    """Return the last parts of some names, or these names if other names have the same last parts."""
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in wanted))
    return ends if set(_matched(names, ends)) == set(wanted) else wanted


def _candidates(model: nn.Module, wrap: str) -> str:
    layers = list(_linear_layers(model, wrap)) or [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear)
    ]
    ends = dict.fromkeys(name.removesuffix(".base_layer").rpartition(".")[2] for name in layers)
    return f"adapter.targets=[{','.join(ends)}]" if ends else "adapter=none, because it has no linear layer"


def save_adapter(model: nn.Module, state: dict[str, Tensor], folder: Path) -> None:
    """Write the adapters of a model so that ``peft`` loads them; ``state`` has whole weights by name."""
    import peft
    from safetensors.torch import save_file

    settings: Any = model.peft_config[ADAPTER]  # type: ignore[index]
    folder.mkdir(parents=True, exist_ok=True)
    named = peft.get_peft_model_state_dict(model, state_dict=state, adapter_name=ADAPTER)
    whole = tuple(f"{name}." for name in settings.modules_to_save or ())
    named |= {name: tensor for name, tensor in state.items() if name.startswith(whole)} if whole else {}
    save_file(
        {f"{SAVED_PREFIX}{name}": tensor.contiguous() for name, tensor in named.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    settings.inference_mode = True
    settings.save_pretrained(folder)

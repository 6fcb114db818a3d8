"""Properties of a built model: embeddings, attention and the inputs that it takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from inspect import signature
from typing import Any

from torch import Tensor, nn

from distexp.config import ConfigError
from distexp.data.base import LOGITS_TO_KEEP
from distexp.models.blocks import NamedModules


def find_embeddings(model: nn.Module) -> NamedModules:
    """Find the token embedding and the output head; empty for image models."""
    getters = (getattr(model, f"get_{side}_embeddings", None) for side in ("input", "output"))
    modules = [getter() for getter in getters if getter is not None]
    names = {id(module): name for name, module in model.named_modules()}
    return [(names[id(module)], module) for module in modules if module is not None]


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each buffer that belongs to a saved model, as running statistics do."""
    saved = model.state_dict(keep_vars=True).keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


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


def learned_positions(model: nn.Module) -> int | None:
    """Return the number of learned positions, which no sequence can exceed; None if the model has none.

    Args:
        model: distexp's GPT or a model of transformers.
    """
    limit, tokens = max_positions(model), [module for _, module in find_embeddings(model)]
    sizes = {
        module.num_embeddings
        for module in model.modules()
        if isinstance(module, nn.Embedding) and all(module is not other for other in tokens)
    }
    # OPT and BART have two more rows.
    return limit if limit is not None and sizes & {limit, limit + 2} else None


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

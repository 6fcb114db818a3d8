"""Which keys a model or a data set has, judged without torch: before anything starts.

The schema is the same for all options of a group, so that a key may be set while the group is swept.
Each option's YAML lists the keys that mean something to it; any other that was set is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from distexp.config import ConfigError, DatasetConfig, ModelConfig

COMMON = frozenset({"_target_", "name", "task", "init", "keys"})
"""Keys that every option has."""

MAY_BE_NULL = ("path", "tokenizer", "vocab_size", "dropout")
INITS = ("random", "pretrained")
SIZES = ("vocab_size", "hidden_size", "num_layers", "num_heads", "ff_dim", "seq_length", "width")


def unused_key_errors(group: str, section: ModelConfig | DatasetConfig) -> list[str]:
    """A sentence for each key of a group that was set and that the chosen option does not have."""
    unset = type(section)()
    has = ", ".join(key for key in section.keys if key != "options") or "no such keys"
    return [
        f"{group}.{key}={getattr(section, key)} is no key of {group}={section.name}, which has {has}: leave it out"
        for key in vars(unset)
        if key not in COMMON and key not in section.keys and getattr(section, key) != getattr(unset, key)
    ]


def model_errors(model: ModelConfig) -> list[str]:
    """A sentence for each error of a model's section: unused, missing and impossible values."""
    return [*unused_key_errors("model", model), *_missing(model), *_impossible(model)]


def validate_model(model: ModelConfig) -> None:
    """Raises ConfigError with all of ``model_errors``."""
    errors = model_errors(model)
    if errors:
        raise ConfigError(errors)


def weights_source(model: ModelConfig) -> str | None:
    """The hub id or folder of a model's weights and tokenizer; None for an architecture without one.

    It is ``model.name`` where that is listed among the keys, else ``model.path``.
    """
    return model.name if weights_source_key(model) == "name" else model.path


def weights_source_key(model: ModelConfig) -> str:
    """The key that ``weights_source`` reads: name or path."""
    return "name" if "name" in model.keys else "path"


def loads_from_source(model: ModelConfig) -> bool:
    """Whether a run reads what is at ``weights_source``: weights, or at least the architecture."""
    return model.init == "pretrained" or "name" in model.keys


def resolve_vocab_size(model: ModelConfig, num_classes: int) -> int:
    """Rows of the embedding: ``model.vocab_size``, else the tokenizer's entries.

    Raises:
        ConfigError: the tokenizer has more entries than the model has rows.
    """
    if model.vocab_size is None:
        return num_classes
    if num_classes > model.vocab_size:
        raise ConfigError(
            f"The tokenizer has {num_classes} entries, more than model.vocab_size={model.vocab_size}: set "
            f"model.vocab_size={num_classes} or null, or choose a smaller tokenizer"
        )
    return model.vocab_size


def _missing(model: ModelConfig) -> Iterator[str]:
    for key in model.keys:
        if key not in MAY_BE_NULL and getattr(model, key) is None:
            yield f"model.{key} is null, and model={model.name} needs it: set it"


def _impossible(model: ModelConfig) -> Iterator[str]:
    yield from _bad_init(model)
    for key in SIZES:
        value = getattr(model, key)
        if value is not None and value < 1:
            yield f"model.{key}={value} must be at least 1"
    if model.dropout is not None and not 0 <= model.dropout < 1:
        yield f"model.dropout={model.dropout} must be from 0 to below 1"
    if model.depths is not None and (len(model.depths) != 4 or min(model.depths) < 1):
        yield f"model.depths={model.depths} must be four numbers of at least 1, as [3,4,6,3]"
    hidden, heads = model.hidden_size, model.num_heads
    if hidden and heads and heads > 0 and hidden % heads:
        yield f"model.hidden_size={hidden} must be a multiple of model.num_heads={heads}: change one of them"


def _bad_init(model: ModelConfig) -> Iterator[str]:
    if model.init == "random":
        return
    if weights_source_key(model) not in model.keys:
        yield f"model.init must be random, not {model.init}: weights are drawn, not loaded"
    elif model.init not in INITS:
        yield f"model.init={model.init} is not one of {', '.join(INITS)}"
    elif weights_source(model) is None:
        yield "model.path is null, and model.init=pretrained reads weights there: set a hub id or a folder"

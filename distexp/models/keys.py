"""Which keys an architecture has, judged without torch: before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from distexp.config import ConfigError, ModelConfig

ARCHITECTURE_KEYS = (
    "tokenizer",
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "ff_dim",
    "seq_length",
    "width",
    "depths",
    "bottleneck",
    "dropout",
    "options",
)
"""Keys that some architectures have and others do not; a model's YAML lists its own in ``keys``."""

UNSET = ModelConfig()
MAY_BE_NULL = ("tokenizer", "vocab_size")
SIZES = ("vocab_size", "hidden_size", "num_layers", "num_heads", "ff_dim", "seq_length", "width")


def unused_keys(model: ModelConfig) -> list[str]:
    """A sentence for each key that was set and that this architecture does not have."""
    has = ", ".join(key for key in model.keys if key != "options") or "no such keys"
    return [
        f"model.{key}={getattr(model, key)} is no key of model={model.name}, which has {has}: leave it out"
        for key in ARCHITECTURE_KEYS
        if key not in model.keys and getattr(model, key) != getattr(UNSET, key)
    ]


def model_faults(model: ModelConfig) -> list[str]:
    """A sentence for each fault of a model's section: unused, missing and impossible values."""
    return [*unused_keys(model), *_missing(model), *_impossible(model)]


def check_model(model: ModelConfig) -> None:
    """Raises ConfigError with all of ``model_faults``."""
    faults = model_faults(model)
    if faults:
        raise ConfigError(faults)


def vocabulary(model: ModelConfig, num_classes: int) -> int:
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
        if key in ARCHITECTURE_KEYS and key not in MAY_BE_NULL and getattr(model, key) is None:
            yield f"model.{key} is null, and model={model.name} needs it: set it"


def _impossible(model: ModelConfig) -> Iterator[str]:
    if model.init != "random":
        yield f"model.init must be random, not {model.init}: weights are drawn, not loaded"
    for key in SIZES:
        value = getattr(model, key)
        if value is not None and value < 1:
            yield f"model.{key}={value} must be at least 1"
    if not 0 <= model.dropout < 1:
        yield f"model.dropout={model.dropout} must be from 0 to below 1"
    if model.depths is not None and (len(model.depths) != 4 or min(model.depths) < 1):
        yield f"model.depths={model.depths} must be four numbers of at least 1, as [3,4,6,3]"
    hidden, heads = model.hidden_size, model.num_heads
    if hidden and heads and heads > 0 and hidden % heads:
        yield f"model.hidden_size={hidden} must be a multiple of model.num_heads={heads}: change one of them"

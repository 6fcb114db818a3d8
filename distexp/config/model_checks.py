"""Checks of the ``model`` and ``dataset`` sections, without importing torch.

The schema is the same for all options of a group, so that a key may be set while the group is swept.
The YAML of each option lists its keys. Setting any other key is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from distexp.config import ConfigError, DatasetConfig, ModelConfig
from distexp.config.paths import conf_dir, options_of
from distexp.config.value_checks import value_errors
from distexp.config.weights_source import weights_source, weights_source_key

COMMON_KEYS = frozenset({"_target_", "name", "task", "init", "keys"})
"""Keys of every option."""

ATTENTIONS = {
    "distexp.models.bloom.build": ("auto", "eager", "sdpa", "flex"),
    "distexp.models.gpt.build": ("auto", "sdpa", "flex"),
}
"""Values of ``model.attention`` for models that do not support all."""

NULLABLE_KEYS = ("path", "tokenizer", "vocab_size", "dropout")


def unused_key_errors(group: str, section: ModelConfig | DatasetConfig) -> list[str]:
    """Return an error for each key that is set and that the chosen option does not have."""
    unset = type(section)()
    unknown = [key for key in section.keys if not isinstance(key, str) or key not in vars(unset)]
    if unknown:
        return [f"{group}.keys contains {unknown[0]!r}, which is not a key of {group}: leave it out"]
    available = ", ".join(key for key in section.keys if key != "options") or "none"
    return [
        f"{group}.{key}={getattr(section, key)} is not a key of {group}={section.name}: "
        + (_dataset_hint(section, key) or f"leave it out. Its keys: {available}")
        for key in vars(unset)
        if key not in COMMON_KEYS and key not in section.keys and getattr(section, key) != getattr(unset, key)
    ]


def _dataset_hint(section: ModelConfig | DatasetConfig, key: str) -> str:
    """Return which other datasets of the same task have a key; empty without one, and for custom datasets."""
    options = options_of("dataset")
    if not isinstance(section, DatasetConfig) or section.name not in options:
        return ""
    files: dict[str, Any] = {option: OmegaConf.load(conf_dir() / "dataset" / f"{option}.yaml") for option in options}
    having = [
        f"dataset={name}"
        for name, content in files.items()
        if key in content["keys"] and content["task"] in (section.task, "any")
    ]
    return f"add {' or '.join(having)}, or leave it out" if having else ""


def model_errors(model: ModelConfig) -> list[str]:
    """Return an error for each unused key, missing value and impossible combination of a model."""
    return [
        *unused_key_errors("model", model),
        *_missing_values(model),
        *_source_errors(model),
        *_head_errors(model),
        *_attention_errors(model),
    ]


def validate_model(model: ModelConfig) -> None:
    """Check the values and the combination of the keys of a model.

    Raises:
        ConfigError: with all errors.
    """
    errors = [*value_errors("model", model), *model_errors(model)]
    if errors:
        raise ConfigError(errors)


def resolve_vocab_size(model: ModelConfig, num_classes: int) -> int:
    """Return the rows of the embedding: ``model.vocab_size``, or the size of the tokenizer.

    Args:
        model: the model.
        num_classes: entries of the tokenizer.

    Raises:
        ConfigError: the tokenizer has more entries than the embedding has rows.
    """
    if model.vocab_size is None:
        return num_classes
    if num_classes > model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size} is smaller than the tokenizer, which has {num_classes} entries: set "
            f"model.vocab_size={num_classes} or null, or choose a smaller tokenizer"
        )
    return model.vocab_size


def _missing_values(model: ModelConfig) -> Iterator[str]:
    for key in model.keys:
        if key in vars(model) and key not in NULLABLE_KEYS and getattr(model, key) is None:
            yield f"model.{key} is null, but model={model.name} needs a value: set it"


def _source_errors(model: ModelConfig) -> Iterator[str]:
    if model.init == "random":
        return
    if weights_source_key(model) not in model.keys:
        yield f"model.init={model.init} is not supported by model={model.name}: use model.init=random"
    elif weights_source(model) is None:
        yield "model.path is null, but model.init=pretrained loads weights from it: set a hub id or a folder"


def _attention_errors(model: ModelConfig) -> Iterator[str]:
    supported = ATTENTIONS.get(model._target_)
    if supported is not None and model.attention not in supported:
        yield (
            f"model.attention={model.attention} is not supported by model={model.name}: use one of "
            f"{', '.join(supported)}"
        )
    if model.attention == "flex" and model.dropout:
        yield (
            f"model.attention=flex has no dropout, but model.dropout={model.dropout}: use model.dropout=0, or "
            "model.attention=sdpa"
        )


def _head_errors(model: ModelConfig) -> Iterator[str]:
    hidden, heads = model.hidden_size, model.num_heads
    if hidden and heads and heads > 0 and hidden % heads:
        yield f"model.hidden_size={hidden} must be a multiple of model.num_heads={heads}: change one of them"

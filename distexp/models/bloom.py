"""BLOOM: transformers' own architecture, with weights drawn at random or read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from distexp.config import ConfigError, ModelConfig
from distexp.config.model_checks import resolve_vocab_size, validate_model
from distexp.models.pretrained import on_meta_device, read_config, read_weights


def build(model: ModelConfig, num_classes: int) -> nn.Module:
    """A BloomForCausalLM: ``input_ids`` and ``attention_mask`` to ``.logits`` (samples, length, vocabulary).

    On the meta device no weights are read.

    Args:
        model: init; path, where init=pretrained finds the weights; hidden_size, num_layers, num_heads, dropout,
            and vocab_size or null for the tokenizer's, of pretrained weights for their own.
        num_classes: entries of the tokenizer.

    Raises:
        ConfigError: values that BLOOM does not have or cannot have, or weights that cannot be read.
    """
    validate_model(model)
    from transformers.models.bloom import BloomConfig, BloomForCausalLM

    if model.init == "pretrained":
        config = _published(model, num_classes)
    else:
        config = BloomConfig(
            vocab_size=resolve_vocab_size(model, num_classes),
            hidden_size=model.hidden_size,
            n_layer=model.num_layers,
            n_head=model.num_heads,
        )
    config.use_cache = False  # keys and values are for generation; training would only hold their memory
    if model.dropout is not None:
        config.hidden_dropout = config.attention_dropout = model.dropout
    if model.init == "pretrained" and model.path is not None and not on_meta_device():
        return read_weights(BloomForCausalLM, "model.path", model.path, config)
    bloom: nn.Module = BloomForCausalLM(config)
    return bloom


def _published(model: ModelConfig, num_classes: int) -> Any:
    """The configuration beside the weights, where it is of the sizes that the keys say."""
    assert model.path is not None, "validate_model"
    config = read_config("model.path", model.path)
    if config.model_type != "bloom":
        raise ConfigError(
            f"model.path={model.path} holds a model of the kind {config.model_type}, and model={model.name} is a "
            f"BLOOM: choose model=hf model.name={model.path}"
        )
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.n_layer,
        "num_heads": config.n_head,
    }
    errors = [
        f"model.{key}={getattr(model, key)} is not the {size} of the weights in model.path={model.path}: set "
        f"model.{key}={size}, or correct the path"
        for key, size in sizes.items()
        if getattr(model, key) not in (None, size)
    ]
    if errors:
        raise ConfigError(errors)
    resolve_vocab_size(replace(model, vocab_size=config.vocab_size), num_classes)
    return config

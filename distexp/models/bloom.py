"""BLOOM in the implementation of transformers, with random or pretrained weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from distexp.config import ConfigError, ModelConfig
from distexp.config.model_checks import resolve_vocab_size, validate_model
from distexp.models.pretrained import on_meta_device, read_config, read_weights

PRELOAD = ("transformers.models.bloom.modeling_bloom",)
"""Imported once for all workers of a node."""


def build(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build a BloomForCausalLM.

    It maps ``input_ids`` and ``attention_mask`` (batch, length) to ``.logits`` (batch, length, vocabulary).
    On the meta device, no weights are read.

    Args:
        model: init; path of the weights if init=pretrained; hidden_size, num_layers, num_heads, dropout, attention;
            vocab_size, where null means the size of the tokenizer or of the pretrained weights.
        num_classes: entries of the tokenizer.

    Raises:
        ConfigError: a value is invalid for BLOOM, or the weights cannot be read.
    """
    validate_model(model)
    from transformers.models.bloom import BloomForCausalLM

    config = _make_config(model, num_classes)
    bloom: nn.Module
    if model.init == "pretrained" and model.path is not None and not on_meta_device():
        bloom = read_weights(BloomForCausalLM, "model.path", model.path, config)
    else:
        bloom = BloomForCausalLM(config)
    if model.attention in ("sdpa", "flex"):
        from distexp.models.bloom_attention import use_attention

        use_attention(bloom, model.attention)
    return bloom


def _make_config(model: ModelConfig, num_classes: int) -> Any:
    from transformers.models.bloom import BloomConfig

    if model.init == "pretrained":
        config = _read_pretrained_config(model, num_classes)
    else:
        config = BloomConfig(
            vocab_size=resolve_vocab_size(model, num_classes),
            hidden_size=model.hidden_size,
            n_layer=model.num_layers,
            n_head=model.num_heads,
        )
    config.use_cache = False  # training never uses cached keys and values, which take memory
    if model.dropout is not None:
        config.hidden_dropout = config.attention_dropout = model.dropout
    return config


def _read_pretrained_config(model: ModelConfig, num_classes: int) -> Any:
    """Read the configuration of the weights, and check that ``model`` and the tokenizer agree with it."""
    assert model.path is not None, "validate_model checks this"
    config = read_config("model.path", model.path)
    if config.model_type != "bloom":
        raise ConfigError(
            f"model.path={model.path} has a model of type {config.model_type}, but model={model.name} is a "
            f"BLOOM: use model=hf model.name={model.path}"
        )
    _check_sizes(model, config)
    resolve_vocab_size(replace(model, vocab_size=config.vocab_size), num_classes)
    return config


def _check_sizes(model: ModelConfig, config: Any) -> None:
    """Raise ConfigError if a size in ``model`` differs from that of the weights."""
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.n_layer,
        "num_heads": config.n_head,
    }
    errors = [
        f"model.{key}={getattr(model, key)} differs from the weights in model.path={model.path}, which have {size}: "
        f"set model.{key}={size}, or correct model.path"
        for key, size in sizes.items()
        if getattr(model, key) not in (None, size)
    ]
    if errors:
        raise ConfigError(errors)

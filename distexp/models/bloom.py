"""BLOOM: transformers' own architecture, with weights drawn at random."""

from __future__ import annotations

from torch import nn

from distexp.config import ModelConfig
from distexp.keys import check_model, vocabulary


def build(model: ModelConfig, num_classes: int) -> nn.Module:
    """A BloomForCausalLM: ``input_ids`` and ``attention_mask`` to ``.logits`` (samples, length, vocabulary).

    Args:
        model: hidden_size, num_layers, num_heads, dropout, and vocab_size or null for the tokenizer's.
        num_classes: entries of the tokenizer.

    Raises:
        ConfigError: values that BLOOM does not have or cannot have.
    """
    check_model(model)
    from transformers.models.bloom import BloomConfig, BloomForCausalLM

    config = BloomConfig(
        vocab_size=vocabulary(model, num_classes),
        hidden_size=model.hidden_size,
        n_layer=model.num_layers,
        n_head=model.num_heads,
        hidden_dropout=model.dropout,
        attention_dropout=model.dropout,
        use_cache=False,  # keys and values are for generation; training would only hold their memory
    )
    bloom: nn.Module = BloomForCausalLM(config)
    return bloom

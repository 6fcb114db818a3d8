"""How many parameters a model will have, counted from its configuration: no torch, no model."""

from __future__ import annotations

from distexp.config import ModelConfig


def parameter_count(model: ModelConfig, layers: int | None = None) -> int | None:
    """Parameters of a model, or of one like it with other layers, a tied weight counted once.

    None for an architecture that is not known here, or one whose vocabulary is the tokenizer's.
    """
    depth = layers or model.num_layers
    if model.vocab_size is None or model.hidden_size is None or depth is None or model.init != "random":
        return None
    if model._target_ == "distexp.models.gpt.build" and model.ff_dim and model.seq_length:
        ends = (1 if model.tie_embeddings else 2) * model.vocab_size + model.seq_length + 2
        return ends * model.hidden_size + depth * _block(model.hidden_size, model.ff_dim)
    if model._target_ == "distexp.models.bloom.build":
        return (model.vocab_size + 4) * model.hidden_size + depth * _block(model.hidden_size, 4 * model.hidden_size)
    return None


def ties_embeddings(model: ModelConfig) -> bool:
    """Whether embedding and head are one weight."""
    return bool(model.tie_embeddings) or model._target_ == "distexp.models.bloom.build"


def _block(hidden: int, inner: int) -> int:
    """Attention (query, key, value, output), MLP and two norms, with their biases."""
    return 4 * (hidden + 1) * hidden + (hidden + 1) * inner + (inner + 1) * hidden + 4 * hidden

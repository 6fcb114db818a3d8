"""Number of parameters of a model, computed from its configuration without building it.

See also ``distexp.measure.flops``.
"""

from __future__ import annotations

from distexp.config import ModelConfig

GPT, BLOOM = "distexp.models.gpt.build", "distexp.models.bloom.build"
"""Targets of the models whose architecture is known here."""

NORM_VECTORS = 2
"""Vectors of the hidden size in a layer norm: scale and bias."""


def parameter_count(model: ModelConfig, layers: int | None = None) -> int | None:
    """Return the number of parameters; a shared weight counts once.

    Args:
        model: the model.
        layers: number of layers to count instead of ``model.num_layers``.

    Returns:
        None for an unknown architecture, or if the vocabulary is that of the tokenizer.
    """
    depth, hidden = layers or model.num_layers, model.hidden_size
    if model.vocab_size is None or hidden is None or depth is None or model.init != "random":
        return None
    if model._target_ == GPT and model.ff_dim and model.seq_length:
        tables = (1 if model.tie_embeddings else 2) * model.vocab_size + model.seq_length  # tokens and positions
        return (tables + NORM_VECTORS) * hidden + depth * _block_parameters(hidden, model.ff_dim)
    if model._target_ == BLOOM:  # It has a norm after the embedding too, and no table of positions.
        return (model.vocab_size + 2 * NORM_VECTORS) * hidden + depth * _block_parameters(hidden, 4 * hidden)
    return None


def ties_embeddings(model: ModelConfig) -> bool:
    """Return whether embedding and output head share one weight."""
    return bool(model.tie_embeddings) or model._target_ == BLOOM


def _block_parameters(hidden: int, inner: int) -> int:
    """Count the parameters of attention, MLP and two norms, with their biases.

    Args:
        hidden: width of the hidden states.
        inner: width of the MLP.
    """
    attention = 4 * (hidden + 1) * hidden  # query, key, value, output
    mlp = (hidden + 1) * inner + (inner + 1) * hidden
    return attention + mlp + 2 * NORM_VECTORS * hidden

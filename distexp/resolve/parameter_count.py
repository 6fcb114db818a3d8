"""Number of parameters of a model, computed from its configuration without building it.

See also ``distexp.measure.flops``.
"""

from __future__ import annotations

from distexp.config import ModelConfig


def parameter_count(model: ModelConfig, layers: int | None = None) -> int | None:
    """Return the number of parameters; a shared weight counts once.

    Args:
        model: the model.
        layers: number of layers to count instead of ``model.num_layers``.

    Returns:
        None for an unknown architecture, or if the vocabulary is that of the tokenizer.
    """
    depth = layers or model.num_layers
    if model.vocab_size is None or model.hidden_size is None or depth is None or model.init != "random":
        return None
    if model._target_ == "distexp.models.gpt.build" and model.ff_dim and model.seq_length:
        rows = (1 if model.tie_embeddings else 2) * model.vocab_size + model.seq_length + 2
        return rows * model.hidden_size + depth * _block(model.hidden_size, model.ff_dim)
    if model._target_ == "distexp.models.bloom.build":
        return (model.vocab_size + 4) * model.hidden_size + depth * _block(model.hidden_size, 4 * model.hidden_size)
    return None


def ties_embeddings(model: ModelConfig) -> bool:
    """Return whether embedding and output head share one weight."""
    return bool(model.tie_embeddings) or model._target_ == "distexp.models.bloom.build"


def _block(hidden: int, inner: int) -> int:
    """Count attention (query, key, value, output), MLP and two norms, with their biases."""
    return 4 * (hidden + 1) * hidden + (hidden + 1) * inner + (inner + 1) * hidden + 4 * hidden

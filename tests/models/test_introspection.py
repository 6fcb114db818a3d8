"""Properties of custom models."""

from __future__ import annotations

from torch import nn

from distexp.models.blueprint import max_positions, read_attention


def test_a_custom_model_may_have_a_config_of_any_class() -> None:
    model = nn.Linear(2, 2)
    model.config = {"max_position_embeddings": 8}  # type: ignore[assignment]
    assert read_attention(model) is None
    assert max_positions(model) is None

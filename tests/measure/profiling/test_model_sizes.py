"""Tests of the sizes of a model that a profile records."""

from __future__ import annotations

from torch import nn

from distexp.measure.profiling.profiler import ModelSizes, read_model_sizes
from distexp.runs.step_files import Parameters


def test_sizes_of_a_model_with_a_shared_and_a_frozen_parameter() -> None:
    embedding, norm, frozen, head = nn.Embedding(10, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    frozen.requires_grad_(False)
    found = read_model_sizes(nn.Sequential(embedding, norm, frozen, head))
    units = (Parameters("0", (40,)), Parameters("1", (4, 4)), Parameters("2", (16, 4), trained=()))
    assert found.units == units, "a frozen unit is gathered too, but has no gradients"
    assert found.groups == ((40,), (4, 4)), "weight decay is for matrices only"
    assert found.modules == ((0,), (1, 2), (3, 4), (0,)), "the head has the parameter of the embedding"
    assert read_model_sizes(None) == ModelSizes()

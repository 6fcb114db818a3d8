"""Batches: what a model of another number format gets."""

from __future__ import annotations

import torch

from distexp.data.base import Batch


def test_only_inputs_in_floating_point_are_cast() -> None:
    images, indices = torch.rand(2, 3, 9, 9), torch.arange(2)
    batch = Batch({"images": images, "indices": indices}, labels=indices, num_samples=2, num_targets=2, num_tokens=0)
    inputs = batch.cast_inputs(torch.bfloat16)
    assert {name: each.dtype for name, each in inputs.items()} == {"images": torch.bfloat16, "indices": torch.int64}
    assert batch.inputs["images"].dtype == torch.float32

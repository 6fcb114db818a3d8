"""FLOPs of a forward pass, compared with those of the matrix products."""

from __future__ import annotations

import pytest
import torch

from distexp.measure.flops import count_forward_flops
from distexp.models import bloom, gpt, resnet
from tests.helpers.runs import resolve_cell

SAMPLES, LENGTH = 3, 10


@pytest.mark.parametrize("name", ["gpt_tiny", "bloom_tiny"])
def test_flops_of_a_transformer_are_those_of_its_matrix_products(name: str) -> None:
    config = resolve_cell(f"model={name}").model
    build = {"gpt_tiny": gpt.build, "bloom_tiny": bloom.build}[name]
    with torch.device("meta"):
        model = build(config, 1024)
    ids = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    hidden, tokens = 64, SAMPLES * LENGTH
    layer = 2 * tokens * (4 * hidden * hidden + 2 * hidden * 256) + 2 * (2 * tokens * LENGTH * hidden)
    expected = 2 * layer + 2 * tokens * hidden * 1024
    assert count_forward_flops(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}) == expected


def test_flops_of_a_resnet_are_those_of_its_convolutions() -> None:
    with torch.device("meta"):
        model = resnet.build(resolve_cell("model=resnet_tiny").model, 10)

    def convolution(channels: int, outputs: int, kernel: int, side: int) -> int:
        return 2 * channels * outputs * kernel * kernel * side * side

    expected = convolution(3, 16, 7, 16) + 2 * convolution(16, 16, 3, 8)
    for width, side in ((16, 4), (32, 2), (64, 1)):
        first, second = convolution(width, 2 * width, 3, side), convolution(2 * width, 2 * width, 3, side)
        expected += first + second + convolution(width, 2 * width, 1, side)
    expected += 2 * 128 * 10
    images = torch.zeros(SAMPLES, 3, 32, 32)
    assert count_forward_flops(model, {"images": images}) == SAMPLES * expected

"""How FSDP groups the blocks of a model into units."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distexp.config import ConfigError
from distexp.strategies.fsdp import MIN_UNIT_PARAMETERS, group_blocks
from tests.helpers.runs import resolve_cell


def block(parameters: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(parameters, 1, bias=False)


@pytest.mark.parametrize(
    ("blocks", "parameters", "size", "expected"),
    [
        (5, 10, 1, [1, 1, 1, 1, 1]),
        (5, 10, 2, [2, 2, 1]),
        (5, 10, 9, [5]),
        (5, 10, "auto", [5]),
        (24, 12_596_224, "auto", [3] * 8),  # BLOOM-560m
        (4, MIN_UNIT_PARAMETERS, "auto", [1, 1, 1, 1]),
        (0, 10, 3, []),
    ],
)
def test_blocks_form_units_in_forward_order(blocks: int, parameters: int, size: int | str, expected: list[int]) -> None:
    modules = [block(parameters) for _ in range(blocks)]
    groups = group_blocks(modules, size)
    assert [len(group) for group in groups] == expected
    assert [module for group in groups for module in group] == modules


def test_a_unit_needs_a_block_and_the_native_trainer() -> None:
    with pytest.raises(ConfigError, match=r"fsdp\.blocks_per_unit=0 must be at least 1 or auto"):
        resolve_cell("strategy=fsdp", "fsdp.blocks_per_unit=0")
    with pytest.raises(ConfigError, match=r"fsdp\.blocks_per_unit=auto is not supported by engine=hf_trainer"):
        resolve_cell("strategy=fsdp", "fsdp.blocks_per_unit=auto", "engine=hf_trainer")
    assert resolve_cell("strategy=fsdp", "fsdp.blocks_per_unit=auto").fsdp.blocks_per_unit == "auto"

"""Which modules of a model FSDP shards as one unit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from distexp.config import ConfigError
from distexp.distributed.context import Context
from distexp.strategies.base import load_strategy
from distexp.strategies.fsdp_units import MIN_UNIT_PARAMETERS, group_blocks
from distexp.system.seeding import seed_everything
from distexp.training.build import build_model, load_data
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


ONE = ("strategy=fsdp", "cluster.workers_per_node=1", "cluster.device=cpu", "dataset.train_size=12")
NESTED = "fsdp.wrap='BloomBlock,BloomMLP'"


@pytest.fixture
def context(one_rank_group: None, tmp_path: Path) -> Context:
    return Context(0, 1, 0, 1, 1, torch.device("cpu"), tmp_path)


def train_step(context: Context, *overrides: str) -> tuple[float, float, int | None]:
    """Return loss, gradient norm and number of units after a step of the tiny BLOOM."""
    config = resolve_cell(*ONE, *overrides)
    seed_everything(config.train.seed)
    data = load_data(config, context)
    model = load_strategy(config).setup(build_model(config, data, context), config, context)
    batch = data.collate([data.train[index] for index in range(4)])
    loss = model.forward_backward(batch, normalizer=torch.tensor(batch.num_targets), last_micro=True)
    return float(loss[0]), float(model.step(1e-3)), model.describe().sharded_units


def test_nested_blocks_are_one_unit_each(context: Context) -> None:
    *plain, units = train_step(context)
    *nested, more_units = train_step(context, NESTED, "fsdp.blocks_per_unit=auto")
    assert nested == plain
    assert (units, more_units) == (3, 5), "two blocks, the root, and two inner ones"
    with pytest.raises(ConfigError, match=r"fsdp.blocks_per_unit=2 is not supported if blocks contain each other"):
        train_step(context, NESTED, "fsdp.blocks_per_unit=2")


def test_a_unit_shares_no_weight_with_other_modules(context: Context) -> None:
    with pytest.raises(
        ConfigError, match=r"makes transformer\.word_embeddings a unit, but .* shares a weight with lm_head"
    ):
        train_step(context, "fsdp.wrap='BloomBlock,Embedding'")


def test_an_embedding_with_a_weight_of_its_own_can_be_named(context: Context) -> None:
    """The tiny GPT has embeddings of tokens and positions; both are units."""
    gpt = ("model=gpt_tiny", "model.tie_embeddings=false")
    *plain, units = train_step(context, *gpt)
    *named, more_units = train_step(context, *gpt, "fsdp.wrap='Block,Embedding'")
    assert named == plain
    assert units is not None
    assert more_units == units + 1

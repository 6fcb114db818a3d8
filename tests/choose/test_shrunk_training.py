"""Tests of a search with ``scale=tiny``."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from distexp.choose.axes import read_axes
from distexp.choose.space import make_space, read_settings
from tests.helpers.planning import composed


@pytest.mark.parametrize("batch", [["train.global_batch_size=16"], []])
def test_a_shrunk_training_has_the_same_global_batch_in_all_candidates(batch: list[str]) -> None:
    """The limits of ``scale=tiny`` made it 8 for micro-batches of 1, so its losses were those of another training."""
    master = OmegaConf.create({"hydra": {"sweep": {"subdir": "0"}}})
    with composed(("scale=tiny", "cluster.workers_per_node=2", *batch)) as (cells, make):
        command = read_settings(cells, master).command
        found = make_space(make, command, [1, 2], read_axes(["strategy=ddp", "train.micro_batch_size"], command))
    configs = [candidate.config for candidate in found if candidate.config is not None]
    assert {config.train.micro_batch_size for config in configs} >= {1, 2, 4}
    assert {config.train.global_batch_size for config in configs} == {16 if batch else 8}

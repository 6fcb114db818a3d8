"""Tests of a search with ``scale=tiny``, and of the command of its winner."""

from __future__ import annotations

import pickle
import zlib

import pytest
from hydra.conf import ConfigSourceInfo
from omegaconf import OmegaConf, open_dict

from distexp.choose.axes import read_axes
from distexp.choose.candidate import Candidate
from distexp.choose.result_texts import command_line
from distexp.choose.space import make_space, read_settings
from distexp.config import ConfigError
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


def test_an_accumulation_that_the_global_batch_replaces_is_refused() -> None:
    """The printed command of the winner had both, so the training was refused."""
    master = OmegaConf.create({"hydra": {"sweep": {"subdir": "0"}}})
    typed = ("command=choose", "train.global_batch_size=16", "train.gradient_accumulation_steps=2")
    with composed(typed) as (cells, _), pytest.raises(ConfigError, match="=16 and each micro-batch set the accumul"):
        read_settings(cells, master)


def test_the_command_of_a_winner_has_the_folder_of_custom_options() -> None:
    master = OmegaConf.create({"hydra": {"sweep": {"subdir": "0"}}})
    source = ConfigSourceInfo("/my conf", "file", "command-line")
    with composed(("scale=tiny", "train.global_batch_size=16")) as (cells, _):
        changed = cells[0].composed
        with open_dict(changed):
            changed.hydra.runtime.config_sources.append(source)
        cells[0].packed = zlib.compress(pickle.dumps(changed))
        settings = read_settings(cells, master)
    command = command_line(settings, Candidate(("strategy=ddp",), (), 4))
    assert command.startswith("distexp --config-dir '/my conf' scale=tiny ")
    assert command.endswith(" strategy=ddp")

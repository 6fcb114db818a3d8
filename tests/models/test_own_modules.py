"""Own modules that do what strategies do not expect: the losses of ``single``, or a message with the key that helps."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from distexp.config import ConfigError
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import RECORD
from distexp.strategies.torch_model import explained_model_errors
from tests.helpers.odd_models import KINDS
from tests.helpers.runs import resolve_cell
from tests.helpers.zoo import SINGLE, STRATEGIES, outcomes, read_outcome, train_all

MODEL = (
    *("model=gpt_tiny", "model._target_=odd_models.build", "model.keys=[tokenizer,options,tie_embeddings]"),
    *("model.vocab_size=null", "model.hidden_size=null", "model.num_layers=null", "model.num_heads=null"),
    *("model.ff_dim=null", "model.seq_length=null", "+model.options.kind=item"),
)
SHARDED, ZERO = ("full_shard", "hybrid_shard"), ("zero1", "zero2", "zero3")
OUTSIDE = r"uses weights of a block outside of its forward pass.* Use fsdp.wrap=none, .* or strategy=ddp"
REFUSED: dict[tuple[str, tuple[str, ...]], str] = {
    ("experts", ("ddp",)): r"add ddp.find_unused_parameters=true",
    ("experts", ZERO): r"only some workers use .*experts.* use sharding=full_shard, or strategy=ddp ddp.find_unused",
    ("unused", ("ddp",)): r"some parameters of Unused had no gradient.* add ddp.find_unused_parameters=true",
    ("method", SHARDED): OUTSIDE,
    ("view", SHARDED): OUTSIDE,
    ("scalar", (*SHARDED, *ZERO, "one_unit")): r"gate of Scalar is a parameter without dimensions.* use strategy=ddp",
}
CELLS = {
    **STRATEGIES,
    "ddp_unused": ("strategy=ddp", "ddp.find_unused_parameters=true"),
    "one_unit": ("sharding=full_shard", "fsdp.wrap=none"),
}
NOTES = {
    "plaintensor": "scale, tables['shift'] is neither a parameter nor a buffer (use register_buffer)",
    "item": "its constructor reads values of tensors (helpers/odd_models.py:",
    "measured": "Measured is built on the CPU, at once, because its constructor reads values of parameters (",
    "types": "the weights of MixedTypes have the types bfloat16, float32, so they are cast to float32",
}

FEW: dict[str, tuple[str, ...]] = {
    "plaintensor": ("full_shard", "zero3"),
    "item": ("full_shard", "zero3"),
    "measured": ("full_shard",),
    "experts": ("ddp", "ddp_unused", "full_shard", "zero3"),
    "unused": ("ddp", "ddp_unused", "full_shard", "zero2"),
    "ftied": ("full_shard", "zero3"),
    "method": ("full_shard", "one_unit", "zero3"),
    "view": ("full_shard", "one_unit"),
    "scalar": ("ddp", "full_shard", "zero1"),
    "empty": ("full_shard", "zero3"),
    "types": ("full_shard", "zero1"),
    "loss": ("full_shard", "zero3"),
    "bidirectional": (),
}
"""Cells that are not left to a release: each refusal, what helps instead, and strategies that differ most."""

HALVES = {"slow": FEW, "release": dict.fromkeys(KINDS, tuple(CELLS))}


def by_half(names: Collection[str]) -> list[Any]:
    """Return the test parameters of some kinds in both halves."""
    return [pytest.param(half, name, marks=getattr(pytest.mark, half)) for half in HALVES for name in names]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that trains all kinds in the cells of a half, and returns their folder."""

    @cache
    def run(half: str) -> Path:
        folder = tmp_path_factory.mktemp("own")
        models = {
            kind: {"model.options": {"kind": kind}, "train.loss": "own" if kind == "loss" else "full"} for kind in KINDS
        }
        train_all(folder, MODEL, models, CELLS, HALVES[half].__getitem__)
        return folder

    return run


@pytest.mark.parametrize(("half", "kind"), by_half([kind for kind in KINDS if kind != "bidirectional"]))
def test_each_strategy_trains_as_single_or_names_the_key_that_helps(
    half: str, kind: str, runs: Callable[[str], Path]
) -> None:
    refused = {cell: text for (name, cells), text in REFUSED.items() if name == kind for cell in cells}
    found = outcomes(runs(half), kind)
    assert found.keys() == {*HALVES[half][kind]}
    for cell, outcome in found.items():
        if cell in refused:
            assert re.search(refused[cell], str(outcome)), (cell, outcome)
        else:
            assert isinstance(outcome, float), (cell, outcome)
            assert outcome < 1e-5, cell


@pytest.mark.slow
def test_a_model_that_sees_later_tokens_is_refused(runs: Callable[[str], Path]) -> None:
    expected = "Bidirectional of model=gpt_tiny is not a causal LM: its logits change with a later token"
    assert expected in str(read_outcome(runs("slow") / "bidirectional-1" / SINGLE))


@pytest.mark.parametrize(("half", "kind"), by_half(NOTES))
def test_a_note_names_what_was_changed(half: str, kind: str, runs: Callable[[str], Path]) -> None:
    log = (runs(half) / f"{kind}-2" / "rank_0.log").read_text()
    assert log.count(NOTES[kind]) == len(HALVES[half][kind])


@pytest.mark.slow
def test_the_record_has_the_cast_and_the_loss(runs: Callable[[str], Path]) -> None:
    built = {
        kind: RunRecord.read(runs("slow") / f"{kind}-2" / "full_shard" / RECORD).built
        for kind in ("types", "loss", "empty")
    }
    assert {kind: (found.cast_from, found.loss) for kind, found in built.items() if found} == {
        "types": ("bfloat16+float32", "full"),
        "loss": (None, "own"),
        "empty": (None, "full"),
    }


def test_an_input_that_is_changed_in_place_is_named() -> None:
    message_of_torch = "Output 0 of RegisterPostBackwardFunction is a view and is being modified inplace. This view"
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=OUTSIDE), explained_model_errors(model, resolve_cell("sharding=full_shard")):
        raise RuntimeError(message_of_torch)

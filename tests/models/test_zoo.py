"""Causal LMs of transformers: each strategy has the losses of ``single``, or refuses the model for a right reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from distexp.config import ConfigError
from distexp.models import hf, task_models
from tests.helpers.runs import resolve_cell
from tests.helpers.zoo import (
    CAUSAL,
    STRATEGIES,
    TRANSFORMERS,
    cells_of,
    hugging_face,
    outcomes,
    train_all,
    write_config,
)

REFUSED = {
    # Its evaluation rescales weights of its blocks outside of their forward pass, so that DeepSpeed sees another order.
    ("rwkv", "zero3"): r"computes its modules in another order .* use zero_stage=2, or sharding=full_shard",
}


DIFFERENT = {
    "gemma3_text": ("full_shard",),
    "gpt2": ("zero1", "zero3"),
    "gpt_oss": ("full_shard", "zero3"),
    "mixtral_router": ("ddp", "zero3"),
    "opt": ("zero2",),
    "rwkv": ("hybrid_shard", "zero3"),
    "zamba2": ("full_shard", "zero3"),
}
"""Architectures whose blocks, attention, experts and shared weights differ most, and the strategies of each in CI."""

HALVES = {
    "slow": {kind: frozenset(cells) for kind, cells in DIFFERENT.items()},
    "release": {kind: cells_of(kind) for kind in CAUSAL},
}
BY_HALF = pytest.mark.parametrize("half", [pytest.param(half, marks=getattr(pytest.mark, half)) for half in HALVES])
CASES = [pytest.param(half, kind, marks=getattr(pytest.mark, half)) for half, kinds in HALVES.items() for kind in kinds]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that trains all architectures of a half, and returns their folder."""

    @cache
    def run(half: str) -> Path:
        folder, cells = tmp_path_factory.mktemp("zoo"), HALVES[half]
        models = {kind: {"model.name": str(write_config(folder, kind))} for kind in cells}
        train_all(folder, hugging_face(folder / "base", "llama"), models, STRATEGIES, cells.__getitem__)
        return folder

    return run


@pytest.mark.parametrize(("half", "kind"), CASES)
def test_each_strategy_has_the_losses_of_single(half: str, kind: str, runs: Callable[[str], Path]) -> None:
    found = outcomes(runs(half), kind)
    assert found.keys() == HALVES[half][kind]
    for cell, outcome in found.items():
        if (kind, cell) in REFUSED:
            assert re.search(REFUSED[kind, cell], str(outcome)), (cell, outcome)
        else:
            assert isinstance(outcome, float), (cell, outcome)
            assert outcome < 1e-5, cell


@BY_HALF
def test_the_architectures_that_are_not_checked_see_no_later_tokens(half: str, tmp_path: Path) -> None:
    kinds = {str(values.get("model_type", kind)): kind for kind, values in reversed(CAUSAL.items())}
    assert kinds.keys() == task_models.CAUSAL_TYPES
    with patch.object(task_models, "CAUSAL_TYPES", frozenset()):
        for kind in HALVES[half].keys() & kinds.values():
            model = resolve_cell(*hugging_face(tmp_path, kind)).model
            torch.manual_seed(1)
            task_models.check_causal(hf.build(model, 300), model)


def test_a_known_architecture_whose_configuration_shows_later_tokens_is_refused(tmp_path: Path) -> None:
    with patch.dict(CAUSAL, {"llama": {**CAUSAL["llama"], "is_causal": False}}):
        model = resolve_cell(*hugging_face(tmp_path, "llama")).model
    torch.manual_seed(1)
    with pytest.raises(ConfigError, match=r"is not a causal LM: its logits change with a later token"):
        task_models.check_causal(hf.build(model, 300), model)


BERTS = {
    **dict.fromkeys(
        ("bert", "electra", "megatron-bert", "rembert", "roberta", "roformer", "xlm-roberta"), "is_decoder"
    ),
    "xlm": "causal",
}


@pytest.mark.parametrize(
    ("kind", "key"),
    [pytest.param(*kind, marks=() if kind[0] in ("bert", "xlm") else pytest.mark.release) for kind in BERTS.items()],
)
def test_a_model_that_sees_later_tokens_is_refused_before_a_worker_starts(kind: str, key: str, tmp_path: Path) -> None:
    if TRANSFORMERS < (5, 23) and kind in ("megatron-bert", "rembert", "roformer"):
        pytest.skip("transformers ignores is_decoder")
    values = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    with patch.dict(CAUSAL, {kind: {**values, "vocab_size": 300, "emb_dim": 32, "n_layers": 1, "n_heads": 4}}):
        overrides = hugging_face(tmp_path, kind)
    added = f"model.options.{key}=true"
    with pytest.raises(ConfigError, match=rf"is not a causal LM.*\({kind} with {key}=false\): add {added}"):
        resolve_cell(*overrides)
    model = resolve_cell(*overrides, f"+{added}").model
    torch.manual_seed(1)
    built = hf.build(model, 300)
    task_models.check_causal(built, model)  # The added key makes it causal.
    built.config.update({key: False})
    seeing = type(built)(built.config)
    with pytest.raises(ConfigError, match=r"is not a causal LM: its logits change with a later token"):
        task_models.check_causal(seeing, model)

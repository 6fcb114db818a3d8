"""Keys that a model does not have, lacks, or cannot have; judged without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from distexp.config import ConfigError, ModelConfig
from distexp.config.model_checks import model_errors, resolve_vocab_size, unused_key_errors
from distexp.config.paths import options_of
from tests.helpers.runs import resolve_cell

GPT = ModelConfig(
    name="gpt_tiny",
    task="causal_lm",
    keys=[
        "tokenizer",
        "vocab_size",
        "hidden_size",
        "num_layers",
        "num_heads",
        "ff_dim",
        "seq_length",
        "dropout",
    ],
    hidden_size=8,
    num_layers=1,
    num_heads=2,
    ff_dim=16,
    seq_length=4,
)


@pytest.mark.parametrize("option", options_of("model"))
def test_shipped_models_have_no_errors(option: str) -> None:
    named = ("model.name=someone/a-model",) if option == "hf" else ()
    assert model_errors(resolve_cell(f"model={option}", *named).model) == []


@pytest.mark.parametrize(("key", "value"), [("width", 16), ("depths", [1, 1, 1, 1]), ("bottleneck", False)])
def test_a_key_of_another_architecture_is_refused(key: str, value: Any) -> None:
    (error,) = unused_key_errors("model", replace(GPT, **{key: value}))
    assert error.startswith(f"model.{key}={value} is no key of model=gpt_tiny, which has tokenizer, vocab_size")
    assert error.endswith("leave it out")


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ("bloom_tiny", "ff_dim"),
        ("bloom_tiny", "seq_length"),
        ("resnet_tiny", "hidden_size"),
        ("gpt", "width"),
    ],
)
def test_configured_models_refuse_them_too(model: str, key: str) -> None:
    config = replace(resolve_cell(f"model={model}").model, **{key: 64})
    assert [error.split("=")[0] for error in unused_key_errors("model", config)] == [f"model.{key}"]


def test_dropout_and_options_are_keys_too() -> None:
    resnet = ModelConfig(name="resnet", keys=["width"], width=8, dropout=0.1, options={"a": 1})
    assert [error.split("=")[0] for error in unused_key_errors("model", resnet)] == [
        "model.dropout",
        "model.options",
    ]
    assert unused_key_errors("model", replace(resnet, dropout=0.0, options={})) == []
    assert "has no such keys" in unused_key_errors("model", ModelConfig(name="own", width=8))[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ff_dim": None}, "model.ff_dim is null, and model=gpt_tiny needs it: set it"),
        ({"num_layers": 0}, "model.num_layers=0 must be at least 1"),
        (
            {"hidden_size": 9},
            "model.hidden_size=9 must be a multiple of model.num_heads=2: change one of them",
        ),
        ({"dropout": 1.0}, "model.dropout=1.0 must be from 0 to below 1"),
        ({"init": "pretrained"}, "model.init must be random, not pretrained: weights are drawn, not loaded"),
        ({"vocab_size": -1}, "model.vocab_size=-1 must be at least 1"),
    ],
)
def test_missing_and_impossible_values_are_sentences(changes: dict[str, Any], message: str) -> None:
    assert model_errors(GPT) == []
    assert model_errors(replace(GPT, **changes)) == [message]


@pytest.mark.parametrize("depths", [[1, 1, 1], [1, 0, 1, 1], []])
def test_a_resnet_has_four_stages(depths: list[int]) -> None:
    resnet = ModelConfig(name="resnet", keys=["depths"], depths=depths)
    assert model_errors(resnet) == [f"model.depths={depths} must be four numbers of at least 1, as [3,4,6,3]"]


def test_a_tokenizer_must_fit_into_the_vocabulary() -> None:
    assert resolve_vocab_size(GPT, 300) == 300
    assert resolve_vocab_size(replace(GPT, vocab_size=512), 300) == 512
    message = r"The tokenizer has 300 entries, more than model.vocab_size=256: set model.vocab_size=300 or null"
    with pytest.raises(ConfigError, match=message):
        resolve_vocab_size(replace(GPT, vocab_size=256), 300)


def test_judging_keys_needs_no_torch() -> None:
    code = "import sys, distexp.config.model_checks; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"

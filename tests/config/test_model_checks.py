"""Tests of the checks of the model and dataset sections."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from distexp.config import ConfigError, ModelConfig
from distexp.config.model_checks import resolve_vocab_size, unused_key_errors, validate_model
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


@pytest.mark.parametrize(("key", "value"), [("width", 16), ("depths", [1, 1, 1, 1]), ("bottleneck", False)])
def test_key_of_another_architecture_is_an_error(key: str, value: Any) -> None:
    (error,) = unused_key_errors("model", replace(GPT, **{key: value}))
    assert error.startswith(f"model.{key}={value} is not a key of model=gpt_tiny: leave it out. Its keys: tokenizer, ")


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ("bloom_tiny", "ff_dim"),
        ("bloom_tiny", "seq_length"),
        ("resnet_tiny", "hidden_size"),
        ("gpt", "width"),
    ],
)
def test_shipped_models_refuse_keys_of_other_architectures(model: str, key: str) -> None:
    config = replace(resolve_cell(f"model={model}").model, **{key: 64})
    assert [error.split("=")[0] for error in unused_key_errors("model", config)] == [f"model.{key}"]


def test_dropout_and_options_are_checked_too() -> None:
    resnet = ModelConfig(name="resnet", keys=["width"], width=8, dropout=0.1, options={"a": 1})
    assert [error.split("=")[0] for error in unused_key_errors("model", resnet)] == [
        "model.dropout",
        "model.options",
    ]
    assert unused_key_errors("model", replace(resnet, dropout=0.0, options={})) == []
    assert "Its keys: none" in unused_key_errors("model", ModelConfig(name="own", width=8))[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ff_dim": None}, "model.ff_dim is null, but model=gpt_tiny needs a value: set it"),
        ({"num_layers": 0}, "model.num_layers=0 must be from 1 to below 10000"),
        (
            {"hidden_size": 9},
            "model.hidden_size=9 must be a multiple of model.num_heads=2: change one of them",
        ),
        ({"dropout": 1.0}, "model.dropout=1 must be from 0 to below 1, or null (default of the architecture)"),
        ({"init": "pretrained"}, "model.init=pretrained is not supported by model=gpt_tiny: use model.init=random"),
        ({"vocab_size": -1}, "model.vocab_size=-1 must be from 1 to below 1000000000, or null (size of the tokenizer)"),
    ],
)
def test_missing_and_impossible_values_are_errors(changes: dict[str, Any], message: str) -> None:
    validate_model(GPT)
    with pytest.raises(ConfigError) as caught:
        validate_model(replace(GPT, **changes))
    assert caught.value.errors == [message]


@pytest.mark.parametrize("depths", [[1, 1, 1], [1, 0, 1, 1], []])
def test_resnet_has_four_stages(depths: list[int]) -> None:
    resnet = ModelConfig(name="resnet", keys=["depths"], task="image_classification", depths=depths)
    with pytest.raises(ConfigError) as caught:
        validate_model(resnet)
    limits = "must be 4 numbers, each from 1 to below 10000, as in [3,4,6,3]"
    assert caught.value.errors == [f"model.depths={depths} {limits}"]


def test_tokenizer_must_fit_into_the_vocabulary() -> None:
    assert resolve_vocab_size(GPT, 300) == 300
    assert resolve_vocab_size(replace(GPT, vocab_size=512), 300) == 512
    message = r"model.vocab_size=256 is smaller than the tokenizer, which has 300 entries: set model.vocab_size=300"
    with pytest.raises(ConfigError, match=message):
        resolve_vocab_size(replace(GPT, vocab_size=256), 300)


def test_model_checks_do_not_import_torch() -> None:
    code = "import sys, distexp.config.model_checks; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"

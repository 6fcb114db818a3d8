"""Tests of the dropout rates of a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from distexp.config import ConfigError
from distexp.models import hf
from distexp.models.transforms import largest_dropout
from tests.helpers.runs import resolve_cell


class Wrapper(nn.Module):
    """A wrapper with a configuration of its own, like the engine of DeepSpeed."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.config: Any = SimpleNamespace(dropout=0.9)


class Functional(nn.Module):
    """A model whose dropout is a function, with the rate in its configuration, like OPT."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.config: Any = SimpleNamespace(dropout=rate)


def test_the_rate_is_that_of_the_wrapped_model() -> None:
    for model, rate in [(Functional(0.1), 0.1), (Functional(0.0), 0.0), (nn.Sequential(nn.Dropout(0.2)), 0.2)]:
        assert largest_dropout(model) == rate
        assert largest_dropout(Wrapper(model)) == rate


def test_a_part_that_is_called_module_hides_no_other_part() -> None:
    model = Wrapper(nn.Linear(2, 2))
    model.before = nn.Dropout(0.3)
    assert largest_dropout(model) == 0.3


@pytest.mark.parametrize(
    ("kind", "rate", "ending"),
    [
        ("m2m_100", "encoder_layerdrop", "layerdrop"),
        ("switch_transformers", "dropout_rate", "dropout"),
        ("switch_transformers", "router_jitter_noise", "noise"),
        ("beit", "drop_path_rate", "path"),
    ],
)
def test_without_dropout_nothing_is_random(kind: str, rate: str, ending: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(kind, **{rate: 0.03, "decoder_start_token_id": 0}).save_pretrained(tmp_path)
    task = "image_classification" if kind == "beit" else "seq2seq_lm"
    typed = ("model=hf", "dataset=synthetic", f"model.name={tmp_path}", "model.init=random", f"model.task={task}")
    models = {}
    for dropout in ("null", "0", "0.2"):
        with torch.device("meta"):
            models[dropout] = hf.build(resolve_cell(*typed, f"model.dropout={dropout}").model, 300)
    assert largest_dropout(models["0"]) == 0
    assert [getattr(model.config, rate) for model in models.values()] == [0.03, 0, 0.2 if ending == "dropout" else 0.03]
    hf.check_layerdrop(models["0"])
    if ending == "layerdrop":
        with pytest.raises(ConfigError, match=r"has encoder_layerdrop=0.03, .* Add model.options.encoder_layerdrop=0 "):
            hf.check_layerdrop(models["0.2"])

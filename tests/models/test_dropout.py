"""Tests of the dropout rates of a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from distexp.config import ConfigError
from distexp.config.custom_code import locate
from distexp.models import hf
from distexp.models.dropout import check_layerdrop, largest_dropout
from distexp.models.task_models import build_torchvision
from distexp.verify.arithmetic import RepeatCheck
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


def test_a_rate_of_a_part_counts_if_the_part_is_built() -> None:
    from transformers import AutoConfig

    model = Functional(0.0)
    model.part = Functional(0.0)
    model.part.config = AutoConfig.for_model("bart", dropout=0.4, encoder_layerdrop=0.2)
    assert largest_dropout(model) == 0.4
    with pytest.raises(ConfigError, match=r"has encoder_layerdrop=0\.2: .* Add model\.dropout=0, or use"):
        check_layerdrop(model)


def test_a_rate_of_a_classification_head_counts_if_the_head_is_built() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    config = AutoConfig.for_model("gpt_neox", vocab_size=32, classifier_dropout=0.1, **sizes)
    assert largest_dropout(AutoModelForCausalLM.from_config(config)) == 0
    assert largest_dropout(AutoModelForTokenClassification.from_config(config)) == 0.1


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
    check_layerdrop(models["0"])
    if ending == "layerdrop":
        with pytest.raises(ConfigError, match=r"has encoder_layerdrop=0.03, .* Add model.options.encoder_layerdrop=0 "):
            check_layerdrop(models["0.2"])


@pytest.mark.parametrize("rate", [0, 0.3])
def test_a_head_with_a_constant_rate_has_the_typed_one(rate: float, tmp_path: Path) -> None:
    """The heads of transformers for the tokens of decoders have a rate of 0.1, which no configuration names."""
    from transformers import AutoConfig

    AutoConfig.for_model(
        "qwen3", hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
    ).save_pretrained(tmp_path)
    words = ("model=hf", f"model.name={tmp_path}", "model.init=random", "model.task=token_classification")
    with torch.device("meta"):
        model = hf.build(resolve_cell(*words, "dataset=synthetic", f"model.dropout={rate}").model, 5)
    assert largest_dropout(model) == rate
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {rate}


def test_rates_of_stages_are_set_and_those_of_an_evaluation_stay(tmp_path: Path) -> None:
    from transformers import AutoConfig

    found = {}
    for kind, task in (("cvt", "image_classification"), ("phimoe", "causal_lm")):
        AutoConfig.for_model(kind).save_pretrained(tmp_path / kind)
        words = (
            "model=hf",
            "dataset=synthetic",
            f"model.name={tmp_path / kind}",
            "model.init=random",
            "model.dropout=0",
        )
        with torch.device("meta"):
            found[kind] = hf.build(resolve_cell(*words, f"model.task={task}").model, 300)
    assert found["cvt"].config.drop_path_rate == [0, 0, 0]
    assert largest_dropout(found["cvt"]) == 0
    assert found["phimoe"].config.router_jitter_noise == 0.01


def test_verify_names_the_rate_that_stays() -> None:
    from transformers import PhimoeConfig, PhimoeForCausalLM

    config = PhimoeConfig(
        **{"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1},
        **{"num_local_experts": 4, "num_attention_heads": 2, "num_key_value_heads": 2},
    )
    model = PhimoeForCausalLM(config)
    RepeatCheck(model, 1e-6, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"switch that off, by model.options.router_jitter_noise=0$"):
        model(torch.randint(32, (64, 64)))


def test_a_rate_that_is_an_integer_and_those_of_all_parts_are_set(tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model("levit", architectures=["LevitForImageClassification"]).save_pretrained(tmp_path / "levit")
    part = {"model_type": "bert", "is_decoder": True, "add_cross_attention": True}
    parts = {"encoder": {"model_type": "bert"}, "decoder": part, "decoder_start_token_id": 0, "pad_token_id": 0}
    AutoConfig.for_model("encoder-decoder", **parts).save_pretrained(tmp_path / "both")
    for kind, task in (("levit", "image_classification"), ("both", "seq2seq_lm")):
        words = ("model=hf", "dataset=synthetic", f"model.name={tmp_path / kind}", "model.init=random")
        with torch.device("meta"):
            built = hf.build(resolve_cell(*words, f"model.task={task}", "model.dropout=0").model, 300)
        assert largest_dropout(built) == 0


@pytest.mark.parametrize(
    ("library", "name", "rates"),
    [
        ("torchvision", "squeezenet1_1", {"null": 0.5, "0": 0, "0.3": 0.3}),
        ("torchvision", "convnext_tiny", {"null": 0.1, "0": 0}),  # It skips paths, and has no dropout.
        ("timm", "mobilevit_xxs", {"null": 0, "0": 0, "0.3": 0.3}),
        ("timm", "ghostnet_050", {"null": 0.2, "0": 0, "0.3": 0.3}),  # by a function
    ],
)
def test_models_of_images_have_the_dropout_that_is_typed(library: str, name: str, rates: dict[str, float]) -> None:
    for dropout, rate in rates.items():
        with torch.device("meta"):
            config = resolve_cell(f"model={library}", f"model.name={name}", f"model.dropout={dropout}").model
            assert largest_dropout(locate(config._target_)(config, 10)) == pytest.approx(rate)


def test_a_model_without_dropout_refuses_a_rate() -> None:
    config = resolve_cell("model=torchvision", "model.name=resnet18", "model.dropout=0.1").model
    with torch.device("meta"), pytest.raises(ConfigError, match=r"model.dropout=0.1 is not supported: ResNet has no"):
        build_torchvision(config, 10)


def test_a_rate_that_a_part_of_a_model_refuses_is_an_error_of_its_key(tmp_path: Path) -> None:
    words = ("model=hf", "dataset=synthetic", f"model.name={tmp_path / 'mpt'}", "model.init=random")
    config = transformers.AutoConfig.for_model("mpt", d_model=16, n_heads=4, n_layers=1, vocab_size=300)
    config.architectures = ["MptForCausalLM"]
    config.save_pretrained(tmp_path / "mpt")
    with pytest.raises(ConfigError, match=r"model.dropout=0.1 is not possible: transformers takes no such attn_pdrop"):
        hf.build(resolve_cell(*words, "model.dropout=0.1").model, 300)
    assert largest_dropout(hf.build(resolve_cell(*words, "model.dropout=0").model, 300)) == 0

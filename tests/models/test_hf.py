"""Causal LMs of transformers: pretrained and random weights, and refused models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from distexp.config import ConfigError
from distexp.console.run_summary import run_title
from distexp.data.tokenization import HuggingFaceTokenizer, load_tokenizer, train_byte_tokenizer
from distexp.distributed.context import Context
from distexp.measure.flops import count_forward_flops
from distexp.models import bloom, hf, task_models
from distexp.models.blueprint import (
    find_embeddings,
    has_tied_embeddings,
    learned_positions,
    persistent_buffers,
    read_attention,
)
from distexp.models.transforms import find_units
from distexp.resolve.run_id import run_id
from distexp.runs.record import RunSpec
from distexp.strategies.zero.ds_initialization import cast_weights
from distexp.training import build
from distexp.training.build import load_data
from tests.helpers.runs import resolve_cell, run_distexp
from tests.helpers.untrusted import FUNCTION, Command

VOCABULARY, HIDDEN, INNER, HEADS = 320, 16, 32, 2
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2": {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": 2, "n_head": HEADS},
    "opt": {
        "model_type": "opt",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "word_embed_proj_dim": HIDDEN,
        "ffn_dim": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
    },
    "bloom": {"model_type": "bloom", "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "n_layer": 2, "n_head": HEADS},
}
EACH = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("llama", "gpt2", "bloom") else pytest.mark.release)
        for name in ARCHITECTURES
    ],
)
BLOCKS = {
    "llama": "model.layers",
    "qwen2": "model.layers",
    "gpt2": "transformer.h",
    "opt": "model.decoder.layers",
    "gpt_neox": "gpt_neox.layers",
    "bloom": "transformer.h",
}


def save_model(folder: Path, values: dict[str, Any], dtype: torch.dtype = torch.float32) -> nn.Module:
    """Save a small random model and a tokenizer in one folder."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    torch.manual_seed(11)
    config = AutoConfig.for_model(**values)
    kind = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
    model: nn.Module = kind.from_config(config, dtype=dtype)
    model.save_pretrained(folder)  # type: ignore[operator]
    train_byte_tokenizer(["Ada is a baker from Oslo.", "Hugo keeps goats."], 300).save(folder)
    return model


def build_model(folder: Path, *overrides: str, classes: int = 300) -> nn.Module:
    return hf.build(resolve_cell("model=hf", f"model.name={folder}", *overrides).model, classes)


@EACH
def test_pretrained_weights_are_loaded_and_blocks_are_found(name: str, tmp_path: Path) -> None:
    saved = save_model(tmp_path, ARCHITECTURES[name])
    model = build_model(tmp_path)
    expected = saved.state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(weight.equal(expected[key]) for key, weight in model.state_dict().items())
    assert [block for block, _ in find_units(model)] == [f"{BLOCKS[name]}.{number}" for number in range(2)]
    assert len(find_embeddings(model)) == 2
    assert has_tied_embeddings(model) == (name not in ("llama", "gpt_neox"))
    assert model.training
    outputs = model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    assert outputs.past_key_values is None


@EACH
def test_a_random_model_depends_on_architecture_and_seed(name: str, tmp_path: Path) -> None:
    saved = save_model(tmp_path, ARCHITECTURES[name])
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(nn.utils.parameters_to_vector(build_model(tmp_path, "model.init=random").parameters()))
    assert models[0].equal(models[1])
    assert not models[0].equal(models[2])
    assert models[0].shape == nn.utils.parameters_to_vector(saved.parameters()).shape


@pytest.mark.parametrize(("name", "attention"), [("llama", "eager"), ("gpt2", "sdpa"), ("bloom", "sdpa")])
def test_the_attention_is_the_chosen_one(name: str, attention: str, tmp_path: Path) -> None:
    save_model(tmp_path, ARCHITECTURES[name])
    model, chosen = build_model(tmp_path).eval(), build_model(tmp_path, f"model.attention={attention}").eval()
    assert read_attention(chosen) == attention
    assert read_attention(model) == ("eager" if name == "bloom" else "sdpa")
    ids = torch.tensor([[5, 7, 11, 13], [2, 3, 0, 0]])
    mask = ids != 0
    logits = [variant(input_ids=ids, attention_mask=mask.long()).logits[mask] for variant in (model, chosen)]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "attention", "message"),
    [
        ("bloom", "flash", r"model.attention=flash is not supported by model.name=.* use model.attention=auto"),
        (
            "gpt2",
            "flex",
            r"flex has no dropout, but attn_pdrop=0.1 in model.name=.*: set model.dropout=0, or use model",
        ),
    ],
)
def test_an_attention_that_the_model_or_machine_lacks_is_refused(
    name: str, attention: str, message: str, tmp_path: Path
) -> None:
    save_model(tmp_path, ARCHITECTURES[name])
    config = resolve_cell("model=hf", f"model.name={tmp_path}").model
    with pytest.raises(ConfigError, match=message):
        hf.build(replace(config, attention=attention), 300)


@pytest.mark.parametrize("init", ["random", "pretrained"])
def test_weights_are_always_loaded_in_fp32(init: str, tmp_path: Path) -> None:
    save_model(tmp_path, LLAMA, torch.bfloat16)
    assert {weight.dtype for weight in build_model(tmp_path, f"model.init={init}").parameters()} == {torch.float32}


@EACH
def test_a_model_on_the_meta_device_needs_no_weights_and_has_flops(name: str, tmp_path: Path) -> None:
    save_model(tmp_path, ARCHITECTURES[name])
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    with torch.device("meta"):
        model = build_model(tmp_path)
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    samples, length = 3, 10
    ids = torch.zeros(samples, length, dtype=torch.long)
    counted = count_forward_flops(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    _, block = find_units(model)[0]
    matrices = sum(weight.numel() for weight in block.parameters() if weight.dim() == 2)
    attention = 2 * (2 * samples * length * length * HIDDEN)
    expected = 2 * (2 * samples * length * matrices + attention) + 2 * samples * length * HIDDEN * VOCABULARY
    # Rotary embeddings add a few matrix products.
    assert expected <= counted <= 1.02 * expected


def test_the_default_dropout_is_that_of_the_architecture(tmp_path: Path) -> None:
    def rates(*overrides: str) -> set[float]:
        return {module.p for module in build_model(tmp_path, *overrides).modules() if isinstance(module, nn.Dropout)}

    save_model(tmp_path, ARCHITECTURES["gpt2"])
    assert rates() == {0.1}
    assert rates("model.dropout=0.3") == {0.3}
    assert rates("model.dropout=0") == {0.0}


TINY = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": HEADS}


def build_random(folder: Path, content: dict[str, Any], *overrides: str) -> nn.Module:
    """Build a model from its ``config.json`` alone."""
    (folder / "config.json").write_text(json.dumps(content))
    model = resolve_cell(
        "model=hf", f"model.name={folder}", "model.init=random", "model.tokenizer=byte", *overrides
    ).model
    return hf.build(model, 300)


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (
            {**TINY, "model_type": "biogpt", "intermediate_size": INNER},
            ("hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout"),
        ),
        (
            {**TINY, "model_type": "gpt_neox", "intermediate_size": INNER},
            ("hidden_dropout", "attention_dropout", "classifier_dropout"),
        ),
        (
            {
                "model_type": "gptj",
                "vocab_size": VOCABULARY,
                "n_embd": HIDDEN,
                "n_layer": 1,
                "n_head": 2,
                "rotary_dim": 4,
            },
            ("embd_pdrop", "attn_pdrop", "resid_pdrop"),
        ),
    ],
)
def test_the_dropout_sets_the_rates_of_any_architecture(
    content: dict[str, Any], names: tuple[str, ...], tmp_path: Path
) -> None:
    built = build_random(tmp_path, content, "model.dropout=0.25")
    assert {name: getattr(built.config, name) for name in names} == dict.fromkeys(names, 0.25)
    assert {module.p for module in built.modules() if isinstance(module, nn.Dropout)} <= {0.25}


def test_the_dropout_of_biogpt_changes_its_output(tmp_path: Path) -> None:
    content = {**TINY, "model_type": "biogpt", "intermediate_size": INNER}
    tokens = torch.arange(8)[None]
    for rate, is_random in (("0", False), ("0.5", True)):
        built = build_random(tmp_path, content, f"model.dropout={rate}").train()
        first, second = (built(input_ids=tokens).logits for _ in range(2))
        assert torch.equal(first, second) != is_random


def test_a_dropout_that_the_architecture_lacks_is_refused_with_the_names(tmp_path: Path) -> None:
    content = {**TINY, "model_type": "mamba", "state_size": 4}
    with pytest.raises(
        ConfigError, match=r"model\.dropout=0\.1 is not supported: .* \(mamba\) has no dropout rate"
    ) as found:
        build_random(tmp_path, content, "model.dropout=0.1")
    assert "(*dropout, *pdrop, *dropout_prob, *dropout_p, *dropout_rate): leave model.dropout out" in str(found.value)
    build_random(tmp_path, content, "model.dropout=0")


def test_auto_is_the_tokenizer_of_the_model(tmp_path: Path) -> None:
    save_model(tmp_path / "llama", LLAMA)
    for overrides in ((), ("model.init=random",)):
        model = resolve_cell("model=hf", f"model.name={tmp_path / 'llama'}", *overrides).model
        tokenizer = load_tokenizer(model, [])
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        assert tokenizer.size <= 300
        assert tokenizer.decode(tokenizer.encode_batch(["Ada"])[0].tolist()) == "Ada"
    assert load_tokenizer(replace(model, tokenizer="byte"), ["a text"]).name.startswith("byte(")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_folder_without_a_tokenizer_is_a_config_error(name: str, tmp_path: Path) -> None:
    save_model(tmp_path, ARCHITECTURES[name])
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    model = replace(resolve_cell("model=hf", f"model.name={tmp_path}", "model.tokenizer=byte").model, tokenizer="auto")
    with pytest.raises(ConfigError, match=rf"model.tokenizer={tmp_path} .*or (to |model.tokenizer=)byte"):
        load_tokenizer(model, [])


def test_the_names_of_a_part_are_checked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    sizes = {"hidden_size": 64, "torch_dtype": "float32"}
    assert hf.read_config("model.name", str(tmp_path), {"text_config": sizes}).text_config.hidden_size == 64
    with pytest.raises(ConfigError, match=r"^model.options.text_config.hiden_size is not .*: use hidden_size, "):
        hf.read_config("model.name", str(tmp_path), {"text_config": {"hiden_size": 64}})


@pytest.mark.parametrize(
    ("typed", "changed"),
    [
        ("rope_theta=5000", {"rope_theta": 5000.0}),
        ("rope_parameters.rope_theta=5000", {"rope_theta": 5000.0}),
        ("rope_scaling={type:linear,factor:2.0}", {"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_a_change_of_the_rope_keeps_its_other_values(typed: str, changed: dict[str, Any], tmp_path: Path) -> None:
    built = build_random(tmp_path, LLAMA | {"rope_theta": 500_000.0}, f"+model.options.{typed}")
    assert built.config.rope_parameters == {"rope_theta": 500_000.0, "rope_type": "default", **changed}


def build_typed(**options: Any) -> Any:
    """Build a model from ``model.options`` alone, and return its configuration."""
    typed = [f"+model.options.{name}={json.dumps(value)}".replace('"', "") for name, value in (TINY | options).items()]
    model = resolve_cell("model=hf", "model.name=m", "model.init=random", "model.tokenizer=byte", *typed).model
    with torch.device("meta"):
        return hf.build(model, 300).config


def test_options_without_a_file_keep_the_other_values_of_the_rope() -> None:
    yarn = build_typed(model_type="gpt_oss").rope_parameters
    assert yarn["rope_type"] == "yarn"
    for typed in ({"rope_theta": 777}, {"rope_parameters": {"rope_theta": 777}}):
        assert build_typed(model_type="gpt_oss", **typed).rope_parameters == {**yarn, "rope_theta": 777.0}
    scaled = build_typed(model_type="llama", rope_scaling={"type": "linear", "factor": 2.0}).rope_parameters
    assert scaled == {"rope_theta": 10_000.0, "rope_type": "linear", "factor": 2.0}


def test_a_misspelled_parameter_of_the_rope_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model.options.rope_scaling.facto is not .*: use rope_scaling.factor, "):
        build_random(tmp_path, LLAMA, "+model.options.rope_scaling={type:linear,facto:2.0}")


def test_each_type_of_layers_has_its_rope(tmp_path: Path) -> None:
    for kind, prefix in (("gemma3", "text_config."), ("gemma3_text", "")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))

        def read(changes: dict[str, Any], prefix: str = prefix) -> dict[str, Any]:
            named = {"text_config": changes} if prefix else changes
            rope: dict[str, Any] = hf.read_config("model.name", str(tmp_path), named).get_text_config().rope_parameters
            return {name: values["rope_theta"] for name, values in rope.items()}

        thetas = read({"rope_parameters": {"full_attention": {"rope_theta": 5000}}})
        assert thetas == {"full_attention": 5000, "sliding_attention": 10_000}
        with pytest.raises(ConfigError, match=rf"^model.options.{prefix}rope_theta is not .*full_attention.rope_theta"):
            read({"rope_theta": 5000})
        each = f"{prefix}rope_parameters"
        for typed, wrong, hint in (
            ({"rope_scaling": {"factor": 8}}, "rope_scaling.factor=8", f"{each}.full_attention.factor"),
            (
                {"rope_parameters": {"rope_theta": 3}},
                "rope_parameters.rope_theta=3",
                f"{each}.full_attention.rope_theta",
            ),
            ({"rope_parameters": {"full_attention": 8}}, "full_attention=8", f"use {each}.full_attention.rope_theta"),
            (
                {"rope_parameters": {"full_attention": {"rope_thea": 3}}},
                "thea",
                f"use {each}.full_attention.rope_theta",
            ),
        ):
            with pytest.raises(ConfigError, match=rf"^model.options.{prefix}\S*{wrong} is not .*{hint}, "):
                read(typed)
    (tmp_path / "config.json").write_text('{"model_type": "opt"}')
    with pytest.raises(ConfigError, match=r"^model.options.rope_theta is not a value of the config.json of"):
        hf.read_config("model.name", str(tmp_path), {"rope_theta": 5000})


def test_a_value_that_varies_between_layers_can_be_set(tmp_path: Path) -> None:
    assert build_typed(model_type="gemma4_text", head_dim=16).to_dict()["head_dim"] == 16
    for kind, typed in (("gemma4_text", {"head_dim": 16.0}), ("gemma4", {"text_config": {"head_dim": 16}})):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        config = hf.read_config("model.name", str(tmp_path), typed)
        assert config.get_text_config().to_dict()["head_dim"] == 16


@pytest.mark.parametrize("section", [None, "text_config"])
def test_a_byte_tokenizer_is_not_larger_than_the_vocabulary(section: str | None, tmp_path: Path) -> None:
    sizes = {"vocab_size": 300}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", **({section: sizes} if section else sizes)})
    )
    model = resolve_cell("model=hf", f"model.name={tmp_path}", "model.tokenizer=byte").model
    assert load_tokenizer(model, [f"{number * 7919:x}" for number in range(3000)]).size == 300


def test_a_tokenizer_must_fit_into_the_embedding(tmp_path: Path) -> None:
    save_model(tmp_path, LLAMA)
    with pytest.raises(
        ConfigError, match=r"the tokenizer has 321 entries, more than the 320 embeddings of model.name"
    ) as caught:
        build_model(tmp_path, classes=321)
    assert "or correct vocab_size in its config.json" in str(caught.value), "the tokenizer is the model's own already"
    with pytest.raises(ConfigError, match=r"more than the 310 .*use a smaller tokenizer, or correct model.options.vo"):
        build_model(tmp_path, "+model.options.vocab_size=310", classes=321)
    typed = ("model=hf", f"model.name={tmp_path}", "model.tokenizer=byte")
    for key, texts in (("model.options.vocab_size", ("+model.options.vocab_size=100",)), ("model.vocab_size", ())):
        model = resolve_cell(*typed, *texts).model
        with pytest.raises(ConfigError, match=f"special tokens: set {key} to at least 258"):
            load_tokenizer(model if texts else replace(model, vocab_size=100), [])


def test_a_model_that_is_not_a_causal_lm_is_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 320, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    save_model(tmp_path, {"model_type": "t5", **sizes})
    for init in ("random", "pretrained"):
        with pytest.raises(ConfigError, match=r"is not a causal LM.*\(t5"):
            build_model(tmp_path, f"model.init={init}")


def test_errors_are_reported_before_anything_starts(tmp_path: Path) -> None:
    def error(*overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            resolve_cell(*overrides)
        return str(caught.value)

    nowhere = tmp_path / "nowhere"
    assert error("model=hf") == (
        "model.name is required: set it to a hub id or a folder, for example model.name=bigscience/bloom-560m"
    )
    assert error("model=hf", f"model.name={nowhere}") == (
        f"model.name={nowhere} does not exist: correct the path, or use a hub id"
    )
    assert "contains no config.json" in error("model=hf", f"model.name={tmp_path}")
    assert error("model=hf", "model.name=a/b", "model.init=other") == (
        "model.init=other is not one of random, pretrained"
    )
    assert "model.hidden_size=4 is not a key of model=a/b" in error("model=hf", "model.name=a/b", "model.hidden_size=4")
    pretrained = ("model=bloom_560m", "model.init=pretrained")
    assert f"model.path={nowhere} does not exist" in error(*pretrained, f"model.path={nowhere}")
    assert "model.path is null" in error(*pretrained, "model.path=null")
    named = ("model=torchvision", "model.name=resnet18", "model.init=pretrained")
    assert "model.path is null, but model.init=pretrained loads weights from it: set a .safetensors" in error(*named)
    assert resolve_cell("model=bloom_560m", f"model.path={nowhere}").model.init == "random"
    assert "is not supported by model=bloom_tiny" in error("model=bloom_tiny", "model.init=pretrained")


def test_damaged_and_partial_weights_are_config_errors(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_model(tmp_path, LLAMA)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    partial = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(partial, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks weights of LlamaForCausalLM, .*: lm_head.weight: use the complete"):
        build_model(tmp_path)
    save_file({**tensors, "lm_head.weight": torch.zeros(7, 3)}, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"have another shape: lm_head.weight: use"):
        build_model(tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r": the weights are damaged \(.*\): copy them again"):
        build_model(tmp_path)
    path.unlink()
    with pytest.raises(ConfigError, match=r"is neither a folder with a model's weights nor"):
        build_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing_known"}))
    with pytest.raises(ConfigError, match=r'"nothing_known" in its config.json, which the installed transf') as caught:
        build_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_weights_that_contain_code_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Command(tmp_path / "started")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=f"{tmp_path} contains {FUNCTION}, which is not data"):
        build_model(tmp_path)
    assert not (tmp_path / "started").exists()


def test_a_pretrained_bloom_is_read_from_its_path(tmp_path: Path) -> None:
    saved = save_model(tmp_path, ARCHITECTURES["bloom"], torch.float16)
    sizes = ("model.vocab_size=320", "model.hidden_size=16", "model.num_layers=2", "model.num_heads=2")
    overrides = ("model=bloom_560m", "model.init=pretrained", f"model.path={tmp_path}", *sizes)
    config = resolve_cell(*overrides).model
    for named in (config, replace(config, vocab_size=None)):
        weights = bloom.build(named, 300).state_dict()
        assert all(weight.equal(saved.state_dict()[name].float()) for name, weight in weights.items())
        with torch.device("meta"):
            assert find_embeddings(bloom.build(named, 300))[0][1].weight.shape == (320, 16)
    assert isinstance(load_tokenizer(config, []), HuggingFaceTokenizer)
    with pytest.raises(
        ConfigError,
        match=r"num_layers=3 differs from the weights in .*, which have 2: set model.num_layers=2",
    ):
        bloom.build(replace(config, num_layers=3), 300)
    with pytest.raises(ConfigError, match=r"model.vocab_size=320 is smaller than the tokenizer, which has 321 entries"):
        bloom.build(replace(config, vocab_size=None), 321)
    save_model(tmp_path / "a llama", LLAMA)
    advice = f'use model=hf "model.name={tmp_path}/a llama"'.replace('"', "'")
    with pytest.raises(ConfigError, match=f"of type llama, but model=bloom_560m is a BLOOM: {advice}"):
        bloom.build(replace(config, path=str(tmp_path / "a llama")), 300)


def test_a_folder_is_identified_by_content_and_shown_by_its_last_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shutil import copytree

    first, copy = tmp_path / "first", tmp_path / "copy"
    save_model(first, LLAMA)
    copytree(first, copy)
    monkeypatch.chdir(tmp_path)
    relative = resolve_cell("model=hf", "model.name=first")
    assert relative.model.name == str(first)
    assert run_title(RunSpec(relative, None)).startswith("first on squad_sample, ")  # type: ignore[arg-type]

    def compute_run_id(folder: Path, *overrides: str) -> str:
        from distexp.resolve.run_id import model_fingerprint

        model_fingerprint.cache_clear()
        return run_id(resolve_cell("model=hf", f"model.name={folder}", *overrides))

    random = compute_run_id(first, "model.init=random")
    assert run_id(relative) == compute_run_id(first) == compute_run_id(copy) != random
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-3] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert compute_run_id(first) != compute_run_id(copy)
    assert compute_run_id(copy, "model.init=random") == random
    assert run_id(resolve_cell("model=bloom_560m")) == run_id(resolve_cell("model=bloom_560m", "model.path=a/b"))


def test_frequencies_of_rope_are_neither_rounded_nor_saved(tmp_path: Path) -> None:
    save_model(tmp_path, LLAMA)
    model = build_model(tmp_path)
    expected = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert any("inv_freq" in name for name in expected)
    for module in model.modules():
        cast_weights(module, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), name
    assert list(persistent_buffers(model)) == []


@pytest.mark.parametrize(
    ("name", "limit"), [("gpt2", 64), ("opt", 64), ("roberta", 62), ("llama", None), ("bloom", None)]
)
def test_learned_positions_limit_the_length(name: str, limit: int | None, tmp_path: Path) -> None:
    size = "n_positions" if name == "gpt2" else "max_position_embeddings"
    architecture = ARCHITECTURES.get(name, {**LLAMA, "model_type": name, "is_decoder": True})
    save_model(tmp_path, {**architecture, **({} if name == "bloom" else {size: 64})})
    assert learned_positions(build_model(tmp_path)) == limit


def test_texts_longer_than_the_positions_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path, {**ARCHITECTURES["gpt2"], "n_positions": 64, "vocab_size": 1100})
    config = resolve_cell(
        *("model=hf", f"model.name={tmp_path}", "model.tokenizer=byte", "dataset.max_length=65", "strategy=single")
    )
    context = Context(0, 1, 0, 1, 1, torch.device("cpu"), tmp_path)
    data = load_data(config, context)
    with pytest.raises(ConfigError, match=r"max_length=65 exceeds the 64 positions .*: use dataset.max_length=64"):
        build.build_model(config, data, context)
    config.dataset.max_length = 64
    build.build_model(config, data, context)


def test_a_tiny_llama_trains_under_fsdp(tmp_path: Path) -> None:
    save_model(tmp_path / "llama", LLAMA)
    done = run_distexp(
        "model=hf",
        f"model.name={tmp_path / 'llama'}",
        "dataset=squad_sample",
        "strategy=fsdp",
        "train.max_steps=2",
        "train.measure_after_step=0",
        "dataset.train_size=32",
        "dataset.eval_size=8",
        "cluster.device=cpu",
        f"hydra.run.dir={tmp_path / 'run'}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["status"] == "completed"
    assert record["built"]["sharded_units"] == 2 + 2 + 1
    assert record["built"]["dropout"] == 0.0
    assert record["built"]["tokenizer"] == str(tmp_path / "llama")
    assert record["metrics"]["tflops_per_device"] > 0
    assert done.stdout.startswith("llama on squad_sample, fsdp full_shard")
    assert "Loading weights" not in done.stdout


@pytest.mark.parametrize(("name", "parameters"), [("llama31_8b", 8_030_261_248), ("mixtral_8x7b", 46_702_792_704)])
def test_a_shape_needs_no_file(name: str, parameters: int) -> None:
    with torch.device("meta"):
        built = hf.build(resolve_cell(f"model={name}", "dataset=synthetic", "dataset.max_length=64").model, 100)
    assert sum(weight.numel() for weight in built.parameters()) == parameters


def test_a_shape_shrinks_and_its_heads_are_checked() -> None:
    tiny = resolve_cell("model=llama31_8b", "scale=tiny", "parallel.tensor=4", "cluster.workers_per_node=4").model
    assert hf.build(tiny, 100).config.to_dict().items() >= {"num_key_value_heads": 4, "hidden_size": 128}.items()
    with pytest.raises(ConfigError, match=r"parallel.tensor=2 is not supported by model.name=mixtral_8x7b \(mixtral\)"):
        resolve_cell("model=mixtral_8x7b", "scale=tiny", "parallel.tensor=2", "cluster.workers_per_node=2")


def test_an_unknown_value_of_a_shape_is_refused() -> None:
    model = resolve_cell("model=llama31_8b", "dataset=synthetic", "+model.options.num_key_value_heds=4").model
    with pytest.raises(ConfigError, match=r"num_key_value_heds is not a value .*\(llama\): use num_key_value_heads"):
        hf.build(model, 100)


BART = {
    **{"model_type": "bart", "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layerdrop": 0.3},
}


@pytest.mark.parametrize(
    ("typed", "name", "value"),
    [
        ("encoder_layerdrop=0", "encoder_layerdrop", 0.0),
        ("encoder_ffn_dim=64.0", "encoder_ffn_dim", 64),
        ("dropout=0", "dropout", 0),
    ],
)
def test_an_option_gets_the_type_of_number_that_transformers_takes(
    typed: str, name: str, value: float, tmp_path: Path
) -> None:
    built = build_random(tmp_path, BART, "dataset=synthetic", "model.task=seq2seq_lm", f"+model.options.{typed}")
    found = getattr(built.config, name)
    assert (found, type(found)) == (value, type(value))
    shape = resolve_cell("model=llama31_8b", "dataset=synthetic", "scale=tiny", "model.options.rms_norm_eps=1").model
    with torch.device("meta"):
        assert hf.build(shape, 100).config.rms_norm_eps == 1


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("+model.options.hidden_act=foo", r"hidden_act=foo \(KeyError: .*foo.*\): correct these options"),
        ("+model.options.hidden_act=foo model.attention=eager", r"hidden_act=foo \(KeyError: "),
        ("+model.options.pad_token_id=5000", r"pad_token_id=5000 \(AssertionError: "),
        ("+model.options.layer_types=[full_attention]", r"layer_types=\['full_attention'\] \(IndexError: "),
    ],
)
def test_options_with_which_no_model_can_be_built_are_named(typed: str, message: str, tmp_path: Path) -> None:
    qwen = {**LLAMA, "model_type": "qwen3"}
    with pytest.raises(ConfigError, match=rf"cannot build model.name={tmp_path} with model.options.{message}"):
        build_random(tmp_path, qwen, *typed.split())


@pytest.mark.parametrize("typed", ["encoder_layerdrop=high", "activation_function=3"])
def test_an_option_that_transformers_does_not_accept_is_a_config_error(typed: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"\(Field '\w+' with value .* type in \(.*\): correct model.options.{typed[:10]}"
    ):
        build_random(tmp_path, BART, "dataset=synthetic", "model.task=seq2seq_lm", f"+model.options.{typed}")
    with pytest.raises(ConfigError, match=r"\(Field 'encoder_layerdrop' .* \(float, NoneType\)\): correct its config"):
        build_random(tmp_path, BART | {"encoder_layerdrop": 1}, "dataset=synthetic", "model.task=seq2seq_lm")
    shape = resolve_cell("model=llama31_8b", "dataset=synthetic", "+model.options.hidden_act=3").model
    with pytest.raises(
        ConfigError, match=r"no model of transformers \(Field 'hidden_act' expected str, got int .*\): correct it"
    ):
        hf.build(shape, 100)


def test_the_tokens_of_a_configuration_without_null_can_be_saved() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("modernbert-decoder", intermediate_size=32, pad_token_id=0, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    tokenizer = SimpleNamespace(pad_id=3, eos_id=1)
    data = SimpleNamespace(tokenizer=tokenizer, class_names=(), task="causal_lm")
    task_models.describe_data(model, cast(Any, data))
    assert (model.config.pad_token_id, model.config.eos_token_id) == (3, 1)
    assert isinstance(model.config.bos_token_id, int)
    assert model.generation_config.bos_token_id is None

"""Packed rows have the loss and the gradients of the same samples in separate rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distexp.config import ConfigError
from distexp.data.base import Batch
from distexp.data.text import PackedSamples, TextCollate
from distexp.models.attention import check_packing
from tests.helpers.attention import build, compute, make_samples, randomize

pytestmark = pytest.mark.usefixtures("flex_backward_on_cpu")

LENGTHS = (5, 1, 9, 16, 2, 4, 7)
ROWS = ((3,), (2, 6), (1, 0, 5, 4))
SIZES: dict[str, Any] = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}
HF_MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "intermediate_size": 32},
    "gpt2": {"vocab_size": 300, "n_embd": 16, "n_layer": 2, "n_head": 2, **NO_TOKENS},
    "modernbert-decoder": {**SIZES, "intermediate_size": 32, "pad_token_id": 0},  # no token may be null
    "mistral": {**SIZES, "intermediate_size": 32, "num_key_value_heads": 2, "sliding_window": 6},
}


def make_batches(
    *, lengths: tuple[int, ...] = LENGTHS, rows: tuple[tuple[int, ...], ...] = ROWS
) -> tuple[Batch, Batch]:
    """Return samples in separate rows, and packed."""
    samples, collate = make_samples(*lengths), TextCollate(0, 20)
    packed = PackedSamples(samples, rows)
    return collate(samples), collate([packed[row] for row in range(len(packed))])


def check_equal(model: nn.Module, unpacked: Batch, packed: Batch) -> None:
    _, loss, gradients = compute(model, unpacked)
    _, packed_loss, packed_gradients = compute(model, packed)
    torch.testing.assert_close(packed_loss, loss, rtol=1e-5, atol=1e-7)
    assert packed_gradients.keys() == gradients.keys()
    for name, expected in gradients.items():
        scale = float(expected.abs().max())
        difference = float((packed_gradients[name] - expected).abs().max())
        assert difference <= 1e-5 * max(scale, 1e-2), name


@pytest.mark.parametrize(
    ("name", "attention"),
    [("bloom_tiny", "sdpa"), ("bloom_tiny", "flex"), ("gpt_tiny", "auto"), ("gpt_tiny", "sdpa"), ("gpt_tiny", "flex")],
)
def test_packed_rows_equal_their_samples(name: str, attention: str) -> None:
    check_equal(build(name, attention), *make_batches())


def build_hf(name: str, implementation: str = "sdpa") -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name, use_cache=False, **HF_MODELS[name])
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    return randomize(model).eval()


@pytest.mark.parametrize("name", HF_MODELS)
def test_models_of_transformers_pack_if_the_check_finds_no_difference(name: str) -> None:
    model = build_hf(name)
    check_packing(model)
    check_equal(model, *make_batches())


def test_models_of_transformers_pack_with_matrix_products() -> None:
    check_equal(build_hf("llama", "eager"), *make_batches())


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("bloom", {"hidden_size": 16, "n_layer": 1, "n_head": 2}),
        ("mamba", {"hidden_size": 16, "num_hidden_layers": 1}),
        ("opt", {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "word_embed_proj_dim": 16}),
    ],
)
def test_models_that_mix_samples_are_refused(name: str, values: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, vocab_size=300, **values))
    with pytest.raises(ConfigError, match=r"position_ids|dataset.packing=true is not supported by .*use dataset.bucke"):
        check_packing(model)


def test_the_check_leaves_the_random_state(tmp_path: Path) -> None:
    model, state = build_hf("gpt2"), torch.get_rng_state()
    check_packing(model)
    assert torch.get_rng_state().equal(state)
    check_packing(build("gpt_tiny", "auto"))
    check_packing(build("bloom_tiny", "sdpa"))

"""The GPT: causal attention, size, and the effect of every key."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from distexp.config import ConfigError, ModelConfig
from distexp.models.blueprint import find_embeddings, has_tied_embeddings
from distexp.models.gpt import GPT, build
from tests.helpers.runs import resolve_cell

LENGTH, VOCABULARY = 12, 50


@pytest.fixture
def model() -> ModelConfig:
    config = resolve_cell("model=gpt_tiny").model
    return replace(config, vocab_size=None, hidden_size=16, num_heads=2, ff_dim=24, seq_length=LENGTH)


@pytest.fixture
def gpt(model: ModelConfig) -> GPT:
    torch.manual_seed(0)
    built = build(model, VOCABULARY).eval()
    assert isinstance(built, GPT)
    return built


def tokens(samples: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(1))


def test_a_later_token_changes_no_earlier_logits(gpt: GPT) -> None:
    ids = tokens()
    before = gpt(ids)
    assert before.shape == (2, LENGTH, VOCABULARY)
    for position in range(LENGTH):
        changed = ids.clone()
        changed[:, position] = (ids[:, position] + 1) % VOCABULARY
        after = gpt(changed)
        torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=1e-6)
        for later in range(position, LENGTH):
            assert not after[:, later].allclose(before[:, later], atol=1e-6), "every later position depends on it"


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_changes_no_logits(gpt: GPT, side: str) -> None:
    ids = tokens(length=8)
    expected = gpt(ids)
    for filling in (0, 7):
        padding, real = torch.full((2, 4), filling), torch.ones_like(ids)
        parts = [(ids, real), (padding, torch.zeros_like(padding))]
        ordered = parts if side == "right" else parts[::-1]
        padded, mask = (torch.cat(pair, dim=1) for pair in zip(*ordered, strict=True))
        logits = gpt(padded, attention_mask=mask)
        assert logits.isfinite().all()
        kept = logits[:, :8] if side == "right" else logits[:, 4:]
        torch.testing.assert_close(kept, expected, rtol=1e-5, atol=1e-6)


def test_logits_depend_on_the_position(gpt: GPT) -> None:
    same = torch.full((1, 4), 3)
    logits = gpt(same)
    assert not logits[0, 0].allclose(logits[0, 1], atol=1e-4)


def test_gradients_reach_every_parameter(gpt: GPT) -> None:
    gpt.train()(tokens()).square().sum().backward()
    assert [name for name, weight in gpt.named_parameters() if weight.grad is None] == []
    assert all(bool(weight.grad.isfinite().all()) for weight in gpt.parameters() if weight.grad is not None)


def test_residual_projections_have_smaller_initial_weights(model: ModelConfig) -> None:
    deep = build(replace(model, hidden_size=64, num_layers=8, ff_dim=256), VOCABULARY)
    spread = {name: float(weight.detach().std()) for name, weight in deep.named_parameters() if weight.dim() == 2}
    assert spread["blocks.3.attention.output.weight"] == pytest.approx(0.02 / 4, rel=0.1)
    assert spread["blocks.3.mlp.output.weight"] == pytest.approx(0.02 / 4, rel=0.1)
    assert spread["blocks.3.mlp.inner.weight"] == pytest.approx(0.02, rel=0.1)
    assert spread["tokens.weight"] == pytest.approx(0.02, rel=0.1)


def test_dropout_is_applied_in_training_only(model: ModelConfig) -> None:
    gpt = build(replace(model, dropout=0.5), VOCABULARY)
    assert not gpt.train()(tokens()).equal(gpt(tokens()))
    assert gpt.eval()(tokens()).equal(gpt(tokens()))


def test_head_and_embedding_are_separate(gpt: GPT) -> None:
    assert [name for name, _ in find_embeddings(gpt)] == ["tokens", "head"]
    assert not has_tied_embeddings(gpt)


def test_too_long_a_sequence_is_refused(gpt: GPT) -> None:
    with pytest.raises(ValueError, match=r"13 tokens exceeds the 12 positions of this model"):
        gpt(tokens(length=LENGTH + 1))


def count_parameters(vocabulary: int, hidden: int, layers: int, inner: int, length: int) -> int:
    attention = 4 * hidden * hidden + 4 * hidden
    mlp = 2 * hidden * inner + inner + hidden
    return 2 * vocabulary * hidden + length * hidden + layers * (attention + mlp + 4 * hidden) + 2 * hidden


def test_the_large_gpt_has_the_expected_size() -> None:
    config = resolve_cell("model=gpt").model
    with torch.device("meta"):
        gpt = build(config, 50_000)
    parameters = sum(weight.numel() for weight in gpt.parameters())
    assert parameters == count_parameters(50_000, 2048, 3, 8192, 512) == 356_927_488


@pytest.mark.parametrize(
    ("key", "value"),
    [("vocab_size", 99), ("hidden_size", 32), ("num_layers", 3), ("ff_dim", 48), ("seq_length", 20)],
)
def test_every_size_has_an_effect(model: ModelConfig, key: str, value: int) -> None:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_layers": 2, "ff_dim": 24, "seq_length": LENGTH}
    built = build(replace(model, **{key: value}), VOCABULARY)
    sizes[key] = value
    assert sum(weight.numel() for weight in built.parameters()) == count_parameters(*sizes.values())


def test_the_number_of_heads_has_an_effect(model: ModelConfig) -> None:
    logits = []
    for heads in (1, 4):
        torch.manual_seed(0)
        logits.append(build(replace(model, num_heads=heads), VOCABULARY).eval()(tokens()))
    assert not logits[0].allclose(logits[1], atol=1e-6)


def test_a_key_of_another_architecture_is_refused(model: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"model.width=3 is not a key of model=gpt_tiny"):
        build(replace(model, width=3), VOCABULARY)


def test_a_tied_head_is_the_embedding_here_and_in_transformers(model: ModelConfig) -> None:
    gpt = build(replace(model, tie_embeddings=True), VOCABULARY)
    assert isinstance(gpt, GPT)
    assert has_tied_embeddings(gpt)
    untied = sum(p.numel() for p in build(model, VOCABULARY).parameters())
    assert sum(p.numel() for p in gpt.parameters()) == untied - VOCABULARY * 16
    converted, state = gpt.to_hugging_face(dict(gpt.named_parameters()))
    assert converted.config.tie_word_embeddings
    assert "lm_head.weight" not in state

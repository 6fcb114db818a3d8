"""BLOOM: published sizes, and the effect of its keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distexp.config import ConfigError
from distexp.models.bloom import build
from distexp.models.blueprint import find_embeddings, has_tied_embeddings
from distexp.models.transforms import find_units
from tests.helpers.runs import resolve_cell


def test_bloom_560m_has_its_published_size() -> None:
    config = resolve_cell("model=bloom_560m").model
    with torch.device("meta"):
        bloom = build(config, 250_680)
    assert sum(weight.numel() for weight in bloom.parameters()) == 559_214_592
    layers = find_units(bloom)
    assert [name for name, _ in layers] == [f"transformer.h.{number}" for number in range(24)]
    assert sum(weight.numel() for _, block in layers for weight in block.parameters()) == 302_309_376
    assert [name for name, _ in find_embeddings(bloom)] == ["transformer.word_embeddings", "lm_head"]
    assert has_tied_embeddings(bloom)


@pytest.mark.parametrize(
    ("name", "layers", "parameters"),
    [("bloom_1b1", 24, 1_065_314_304), ("bloom_1b7", 24, 1_722_408_960), ("bloom_3b", 30, 3_002_557_440)],
)
def test_larger_blooms_have_their_published_sizes(name: str, layers: int, parameters: int) -> None:
    with torch.device("meta"):
        bloom = build(resolve_cell(f"model={name}").model, 250_680)
    assert sum(weight.numel() for weight in bloom.parameters()) == parameters
    assert len(find_units(bloom)) == layers


def test_bloom_tiny_is_a_bloom_without_a_cache() -> None:
    config = resolve_cell("model=bloom_tiny").model
    bloom = build(config, 300)
    ids = torch.randint(300, (2, 9))
    outputs = bloom(input_ids=ids, attention_mask=torch.ones_like(ids))
    assert type(bloom).__name__ == "BloomForCausalLM"
    assert outputs.logits.shape == (2, 9, 1024)
    assert outputs.past_key_values is None
    assert sum(weight.numel() for weight in bloom.parameters()) == 165_760


def test_the_default_vocabulary_size_is_that_of_the_tokenizer() -> None:
    config = replace(resolve_cell("model=bloom_tiny").model, vocab_size=None)
    assert find_embeddings(build(config, 300))[0][1].weight.shape == (300, 64)
    with pytest.raises(ConfigError, match=r"model.vocab_size=299 is smaller than the tokenizer, which has 300 entries"):
        build(replace(config, vocab_size=299), 300)


def test_weights_depend_on_the_seed_and_dropout_is_applied() -> None:
    config = resolve_cell("model=bloom_tiny").model
    ids = torch.randint(300, (1, 5))
    logits = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        logits.append(build(config, 300)(input_ids=ids).logits)
    assert logits[0].equal(logits[1])
    assert not logits[0].equal(logits[2])
    noisy = build(replace(config, dropout=0.5), 300).train()
    assert not noisy(input_ids=ids).logits.equal(noisy(input_ids=ids).logits)


def test_a_key_of_another_architecture_is_refused() -> None:
    config = replace(resolve_cell("model=bloom_tiny").model, ff_dim=256)
    with pytest.raises(
        ConfigError, match=r"model.ff_dim=256 is not a key of model=bloom_tiny: leave it out. Its keys: tokenizer"
    ):
        build(config, 300)

"""Greedy answers in padded batches are those of transformers' own generation, prompt by prompt."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distexp.config import ConfigError
from distexp.data import synthetic
from distexp.data.base import Batch
from distexp.models import gpt
from distexp.models.introspection import max_positions
from distexp.strategies.base import DistributedModel
from distexp.worker.generation import Writer, check_answerable
from tests.helpers.runs import resolve_cell

VOCABULARY = 61
LENGTHS = (9, 3, 70, 64, 1)


@dataclass
class Numbers:
    """A tokenizer whose text is the ids themselves."""

    eos_id: int
    size: int = VOCABULARY
    pad_id: int = 0

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


class Plain:
    """The forward pass of an engine; notes the widths that it was given."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model.eval()
        self.widths: list[int] = []

    @torch.no_grad()
    def forward(self, batch: Batch) -> Any:
        self.widths.append(batch.inputs["input_ids"].shape[1])
        return self.module(**batch.inputs)


def prompts() -> list[Any]:
    chance = np.random.default_rng(3)
    return [chance.integers(1, VOCABULARY, length).astype(np.int32) for length in LENGTHS]


def write(model: nn.Module, *, eos_id: int, most: int, size: int = VOCABULARY) -> tuple[list[list[int]], Plain]:
    engine, beats = Plain(model), []
    tokenizer = Numbers(eos_id, size)
    writer = Writer(
        cast(DistributedModel, engine), cast(Any, tokenizer), most, torch.device("cpu"), lambda: beats.append(1)
    )
    answers = [[int(word) for word in text.split()] for text in writer.write(prompts(), [True] * 4 + [False])]
    assert len(beats) == len(engine.widths)
    return answers, engine


def bloom(rows: int = VOCABULARY) -> nn.Module:
    from transformers.models.bloom import BloomConfig, BloomForCausalLM

    torch.manual_seed(5)
    model: nn.Module = BloomForCausalLM(BloomConfig(vocab_size=rows, hidden_size=16, n_layer=2, n_head=2))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)  # the usual start repeats one token
    return model


def test_answers_are_those_of_transformers() -> None:
    model = bloom()
    free, _ = write(model, eos_id=VOCABULARY + 1, most=12)
    assert [len(answer) for answer in free] == [12] * 4 + [0]
    assert len({tuple(answer) for answer in free[:4]}) == 4
    # A token that some answers hold ends them where it stands; the others go on.
    eos_id = free[0][4]
    answers, engine = write(model, eos_id=eos_id, most=12)
    for prompt, answer, unended in zip(prompts()[:4], answers, free, strict=False):
        own = model.generate(  # type: ignore[operator]
            torch.from_numpy(prompt.astype(np.int64))[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=12, do_sample=False, eos_token_id=eos_id, pad_token_id=0, use_cache=False,
        )  # fmt: skip
        expected = [token for token in own[0, len(prompt) :].tolist() if token != eos_id]
        assert answer == expected
        assert answer == unended[: len(answer)]
    assert len(answers[0]) < 12
    assert set(engine.widths) == {128}, "70 tokens and 12 more, in whole multiples of 64"


class Counting(nn.Module):
    """Says the number of tokens it was shown, as a token."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        said = attention_mask.cumsum(dim=1)
        return nn.functional.one_hot(said, VOCABULARY + 50).float()


def test_it_goes_on_until_the_last_answer_has_ended_and_no_longer() -> None:
    answers, engine = write(Counting(), eos_id=71, most=70, size=VOCABULARY + 50)
    assert answers == [[*range(9, 71)], [*range(3, 71)], [70], [*range(64, 71)], []]
    assert engine.widths == [128] * 59 + [192] * 10, "the second prompt's 68 tokens and their end"


def test_only_tokens_of_the_tokenizer_are_written() -> None:
    answers, _ = write(bloom(rows=200), eos_id=0, most=12, size=VOCABULARY)
    assert max(token for answer in answers for token in answer) < VOCABULARY


def test_an_answer_ends_where_the_positions_do() -> None:
    config = resolve_cell("model=gpt_tiny", "model.seq_length=72", "dataset.max_length=72").model
    torch.manual_seed(5)
    model = gpt.build(config, VOCABULARY)
    answers, engine = write(model, eos_id=config.vocab_size or 0, most=8)
    assert [len(answer) for answer in answers] == [8, 8, 2, 8, 0]
    assert engine.widths == [72] * 8
    alone = torch.from_numpy(prompts()[1].astype(np.int64))[None]
    with torch.no_grad():
        for token in answers[1]:
            assert model(alone)[0, -1, :VOCABULARY].argmax() == token
            alone = torch.cat([alone, torch.tensor([[token]])], dim=1)


def test_positions_of_models() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        learned = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16))
        assert max_positions(learned) == 16
        assert max_positions(cast(nn.Module, SimpleNamespace(module=learned))) == 16
        assert max_positions(bloom()) is None, "ALiBi has no longest sequence"


def test_data_without_references_are_refused() -> None:
    config = resolve_cell("dataset=synthetic")
    with pytest.raises(ConfigError, match="needs an evaluation set of questions with references"):
        check_answerable(synthetic.load(config.dataset, config.model, 1))


@pytest.mark.parametrize("words", [("dataset=synthetic",), ("model=resnet_tiny",)])
def test_what_has_no_references_is_refused_before_anything_starts(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"train\.score_answers=true scores answers against references, and dataset="):
        resolve_cell("train.score_answers=true", *words)
    with pytest.raises(ConfigError, match=r"dataset\.answer_tokens=9 is not a key of dataset="):
        resolve_cell("dataset.answer_tokens=9", *words)

"""Greedy answers in padded batches, compared with transformers' generation of one prompt at a time."""

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
from distexp.models.blueprint import max_positions
from distexp.strategies.base import DistributedModel
from distexp.training.generation import GreedyGenerator, check_has_references
from tests.helpers.attention import build
from tests.helpers.runs import resolve_cell

VOCABULARY = 61
LENGTHS = (9, 3, 70, 64, 1)


@dataclass
class Numbers:
    """Tokenizer whose text is the token ids."""

    eos_id: int
    size: int = VOCABULARY
    pad_id: int = 0

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


class Recorder:
    """Forward pass of a model that records the width of each batch."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model.eval()
        self.widths: list[int] = []

    @torch.no_grad()
    def forward(self, batch: Batch) -> Any:
        self.widths.append(batch.inputs["input_ids"].shape[1])
        return self.module(**batch.inputs)


def prompts() -> list[Any]:
    generator = np.random.default_rng(3)
    return [generator.integers(1, VOCABULARY, length).astype(np.int32) for length in LENGTHS]


def generate(model: nn.Module, *, eos_id: int, most: int, size: int = VOCABULARY) -> tuple[list[list[int]], Recorder]:
    engine, beats = Recorder(model), []
    tokenizer = Numbers(eos_id, size)
    generator = GreedyGenerator(
        cast(DistributedModel, engine), cast(Any, tokenizer), most, torch.device("cpu"), lambda: beats.append(1)
    )
    answers = [[int(token) for token in text.split()] for text in generator.generate(prompts(), [True] * 4 + [False])]
    assert len(beats) == len(engine.widths)
    return answers, engine


def bloom(rows: int = VOCABULARY) -> nn.Module:
    from transformers.models.bloom import BloomConfig, BloomForCausalLM

    torch.manual_seed(5)
    model: nn.Module = BloomForCausalLM(BloomConfig(vocab_size=rows, hidden_size=16, n_layer=2, n_head=2))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)  # With the usual initialization it repeats one token.
    return model


def test_answers_match_transformers() -> None:
    model = bloom()
    free, _ = generate(model, eos_id=VOCABULARY + 1, most=12)
    assert [len(answer) for answer in free] == [12] * 4 + [0]
    assert len({tuple(answer) for answer in free[:4]}) == 4
    # The answers that contain this token end there. The others continue.
    eos_id = free[0][4]
    answers, engine = generate(model, eos_id=eos_id, most=12)
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
    assert set(engine.widths) == {128}, "70 + 12 tokens, rounded up to a multiple of 64"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("attention", ["sdpa", "flex"])
@pytest.mark.parametrize("name", ["bloom_tiny", "gpt_tiny"])
def test_answers_do_not_depend_on_the_attention(name: str, attention: str) -> None:
    """Prompts of different lengths, whose padding a wrong mask would show, as after ``train.compile=model``."""
    sizes = {"seq_length": 128} if name == "gpt_tiny" else {"hidden_size": 32, "num_heads": 2}

    def answer(implementation: str) -> list[list[int]]:
        model = build(name, implementation, **sizes)
        torch.manual_seed(5)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.5)
        return generate(model, eos_id=VOCABULARY + 1, most=6)[0]

    expected = answer("auto")
    with torch.compiler.set_stance("force_eager"):
        answers = answer(attention)
    assert answers == expected
    assert len({tuple(answer) for answer in answers}) > 2, "the model repeats no single answer"


class Counting(nn.Module):
    """Model whose next token is the number of tokens so far."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        count = attention_mask.cumsum(dim=1)
        return nn.functional.one_hot(count, VOCABULARY + 50).float()


def test_generation_stops_when_the_last_answer_ends() -> None:
    answers, engine = generate(Counting(), eos_id=71, most=70, size=VOCABULARY + 50)
    assert answers == [[*range(9, 71)], [*range(3, 71)], [70], [*range(64, 71)], []]
    assert engine.widths == [128] * 59 + [192] * 10, "the second answer has 68 tokens and an end token"


def test_only_tokens_of_the_tokenizer_are_generated() -> None:
    answers, _ = generate(bloom(rows=200), eos_id=0, most=12, size=VOCABULARY)
    assert max(token for answer in answers for token in answer) < VOCABULARY


def test_an_answer_ends_at_the_last_position_of_the_model() -> None:
    config = resolve_cell("model=gpt_tiny", "model.seq_length=72", "dataset.max_length=72").model
    torch.manual_seed(5)
    model = gpt.build(config, VOCABULARY)
    answers, engine = generate(model, eos_id=config.vocab_size or 0, most=8)
    assert [len(answer) for answer in answers] == [8, 8, 2, 8, 0]
    assert engine.widths == [72] * 8
    sequence = torch.from_numpy(prompts()[1].astype(np.int64))[None]
    with torch.no_grad():
        for token in answers[1]:
            assert model(sequence)[0, -1, :VOCABULARY].argmax() == token
            sequence = torch.cat([sequence, torch.tensor([[token]])], dim=1)


def test_an_answer_of_roberta_ends_at_the_last_position_after_the_padding() -> None:
    from transformers import RobertaConfig, RobertaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = RobertaForCausalLM(RobertaConfig(**sizes, max_position_embeddings=73, pad_token_id=0, is_decoder=True))
    answers, engine = generate(model, eos_id=VOCABULARY + 1, most=8)
    assert [len(answer) for answer in answers] == [8, 8, 2, 8, 0]
    assert engine.widths == [72] * 8


def test_max_positions_of_models() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        learned = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16))
        assert max_positions(learned) == 16
        assert max_positions(cast(nn.Module, SimpleNamespace(module=learned))) == 16
        assert max_positions(bloom()) is None, "ALiBi has no limit"


def test_an_evaluation_set_without_references_is_rejected() -> None:
    config = resolve_cell("dataset=synthetic")
    with pytest.raises(ConfigError, match="needs an evaluation set of questions with references"):
        check_has_references(synthetic.load(config.dataset, config.model, 1))


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("dataset=synthetic", "needs reference answers, but dataset="),
        ("model=resnet_tiny", "is for causal_lm, but model=resnet_tiny is for image_classification: leave it out"),
    ],
)
def test_score_answers_without_references_is_rejected_before_the_start(override: str, error: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.score_answers=true {error}"):
        resolve_cell("train.score_answers=true", override)
    with pytest.raises(ConfigError, match=r"dataset\.answer_tokens=9 is not a key of dataset="):
        resolve_cell("dataset.answer_tokens=9", override)

"""Greedy generation of answers by a trained model, and their SQuAD metrics.

Each token needs a whole forward pass, because there is no cache of keys and values. So a strategy needs nothing but
its forward pass. All ranks make the same number of passes, because FSDP and ZeRO-3 gather parameters in each.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, device

from distexp.config import ConfigError
from distexp.data.base import IGNORE, LOGITS_TO_KEEP, Batch, TaskData
from distexp.data.loader import ShardedLoader
from distexp.data.squad import QASamples
from distexp.data.tokenization import TokenIds, Tokenizer
from distexp.distributed.process_group import broadcast_buffers, gather_to_all, sum_over_ranks
from distexp.models import blueprint, objective
from distexp.strategies.base import EvaluableModel

PAD_MULTIPLE = 64  # sequences are padded to a multiple of it, so that the shapes of the forward passes repeat


def check_has_references(data: TaskData) -> None:
    """Raise ConfigError if answers cannot be scored, before the training and not after it."""
    if not isinstance(data.evaluation, QASamples) or not data.evaluation.references:
        raise ConfigError(
            "train.score_answers=true needs an evaluation set of questions with references "
            f"(distexp.data.squad.QASamples), but this one is {type(data.evaluation).__name__}: set it to false"
        )


def score_answers(
    model: EvaluableModel, data: ShardedLoader, tokenizer: Tokenizer, max_new_tokens: int, beat: Callable[[], None]
) -> tuple[Score, dict[str, str]]:
    """Return exact match and F1 of the whole evaluation set, and each answer by the id of its question, on every rank.

    An answer has at most ``max_new_tokens``. It also ends at its end token, or if the sequence fills the positions of
    the model. A question that was too long for the model has no answer, and counts as wrong. ``beat`` is called after
    every token, so that the run does not count as hung.
    """
    samples = data.samples
    assert isinstance(samples, QASamples), "check_has_references"
    generator = GreedyGenerator(model, tokenizer, max_new_tokens, data.device, beat)
    # Prompts of similar length share a batch. The longest are first, so that a run out of memory fails early.
    order = np.argsort(-samples.prompt_lengths, kind="stable").tolist()
    model.module.eval()
    broadcast_buffers(model.module)
    mine: dict[int, str] = {}
    for batch in data.sampler:
        indices = [order[index % len(order)] for index in batch]
        is_padding = [index >= len(order) for index in batch]
        prompts = [samples.prompt(index) for index in indices]
        answers = generator.generate(prompts, [not padding for padding in is_padding])
        mine |= {i: answer for i, answer, padding in zip(indices, answers, is_padding, strict=True) if not padding}
    answer_of = {index: answer for part in gather_to_all(mine) for index, answer in part.items()}
    answered = ((answer_of[index], references) for index, references in enumerate(samples.references))
    found = score(answered, unanswered=samples.too_long)
    return found, {identity: answer_of[index] for index, identity in enumerate(samples.ids)}


@dataclass(frozen=True)
class GreedyGenerator:
    """Generator of answers to prompts. All ranks make their forward passes together."""

    model: EvaluableModel
    tokenizer: Tokenizer
    max_new_tokens: int
    device: device
    beat: Callable[[], None]

    def generate(self, prompts: Sequence[TokenIds], wanted: Sequence[bool]) -> list[str]:
        """Return the answer to each prompt, or an empty one if unwanted. All ranks go through the same passes."""
        starts = [len(prompt) for prompt in prompts]
        capacity = _round_up(max(starts) + self.max_new_tokens)
        ids = torch.full((len(prompts), capacity), self.tokenizer.pad_id, device=self.device)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = torch.from_numpy(prompt.astype(np.int64))
        module = self.model.module
        limit = blueprint.learned_positions(module) or blueprint.max_positions(module) or capacity
        lengths = torch.tensor(starts, device=self.device)
        unfinished = torch.tensor(wanted, device=self.device)
        rows = torch.arange(len(prompts), device=self.device)
        for generated in range(self.max_new_tokens):
            unfinished &= lengths < limit
            if not sum_over_ranks(unfinished.sum()).item():
                break
            width = min(_round_up(max(starts) + generated), limit)
            chosen = self._next_tokens(ids[:, :width].contiguous(), lengths)
            unfinished &= chosen != self.tokenizer.eos_id
            ids[rows, lengths] = torch.where(unfinished, chosen, self.tokenizer.pad_id)
            lengths += unfinished
            self.beat()
        answers = (row[start:end] for row, start, end in zip(ids.tolist(), starts, lengths.tolist(), strict=True))
        return [self.tokenizer.decode(answer).strip() for answer in answers]

    def _next_tokens(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the most likely next token of each row, of those that the tokenizer has, shape (rows,)."""
        mask = (torch.arange(ids.shape[1], device=self.device) < lengths[:, None]).long()
        inputs, last = {"input_ids": ids, "attention_mask": mask}, lengths - 1
        if blueprint.supports_logits_to_keep(self.model.module):
            inputs[LOGITS_TO_KEEP], last = last, torch.arange(len(ids), device=self.device)
        labels = torch.full_like(ids, IGNORE)
        batch = Batch(inputs=inputs, labels=labels, num_samples=len(ids), num_targets=0, num_tokens=0)
        logits = objective.whole_logits(self.model.forward(batch))
        following = logits[torch.arange(len(ids), device=self.device), last]
        return following[:, : self.tokenizer.size].argmax(dim=-1)


def _round_up(length: int) -> int:
    return -(-length // PAD_MULTIPLE) * PAD_MULTIPLE


# Exact match and F1 of SQuAD v1.1, identical to its official evaluation script. Why not a library: ``evaluate``
# downloads its metric from the Hub, and torchmetrics follows SQuAD 2.0, whose F1 of two empty texts is 1 instead of 0.

ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)  # only ASCII, as in the official script


@dataclass(frozen=True)
class Score:
    """Mean exact match and F1 of answers, in percent from 0 to 100."""

    exact_match: float
    f1: float


def score(answers: Iterable[tuple[str, Sequence[str]]], unanswered: int = 0) -> Score:
    """Return the mean of the best scores; unanswered questions count as 0. Raises ValueError if there are none."""
    exact, overlap, count = 0.0, 0.0, unanswered
    for answer, references in answers:
        exact += max(exact_match(answer, reference) for reference in references)
        overlap += max(f1(answer, reference) for reference in references)
        count += 1
    if not count:
        raise ValueError("no answers: there is nothing to score")
    return Score(100 * exact / count, 100 * overlap / count)


def normalize(text: str) -> str:
    """Return a text in lower case, without punctuation and English articles, with single spaces."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


def exact_match(answer: str, reference: str) -> bool:
    """Return whether two texts are equal after normalization."""
    return normalize(answer) == normalize(reference)


def f1(answer: str, reference: str) -> float:
    """Return the harmonic mean of precision and recall of words, from 0 to 1."""
    ours, theirs = normalize(answer).split(), normalize(reference).split()
    shared = (Counter(ours) & Counter(theirs)).total()
    return 2 * shared / (len(ours) + len(theirs)) if shared else 0.0

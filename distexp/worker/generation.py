"""The answers that a trained model gives, greedily, a token at a time, and how right they are.

Each token costs a whole forward pass; no keys and values are kept. So all that is asked of a strategy is the
forward pass that it has, and every rank makes equally many: FSDP and ZeRO-3 gather parameters in each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, device

from distexp.config import ConfigError
from distexp.data.base import IGNORE, LOGITS_TO_KEEP, Batch, TaskData
from distexp.data.qa import QASamples
from distexp.data.shards import ShardedLoader
from distexp.data.tokenization import TokenIds, Tokenizer
from distexp.distributed.process_group import gather_to_all, sum_over_ranks
from distexp.measure.squad_metric import Score, score
from distexp.models.introspection import max_positions, supports_logits_to_keep
from distexp.models.objective import get_logits
from distexp.strategies.base import EvaluableModel

WIDTHS = 64
"""Sequences are padded to a multiple of it, so that the shapes of forward passes repeat."""


def check_answerable(data: TaskData) -> None:
    """Raises ConfigError where there is nothing to score an answer by; better before a training than after."""
    if not isinstance(data.evaluation, QASamples) or not data.evaluation.references:
        raise ConfigError(
            "train.score_answers=true needs an evaluation set of questions with references "
            f"(distexp.data.qa.QASamples), and this one is {type(data.evaluation).__name__}: set it to false"
        )


def score_answers(
    model: EvaluableModel, data: ShardedLoader, tokenizer: Tokenizer, most_tokens: int, beat: Callable[[], None]
) -> tuple[Score, dict[str, str]]:
    """Exact match and F1 over the whole evaluation set, and each question's answer by its id, on every rank.

    Args:
        data: the evaluation set, of QASamples; answers are generated in its batches.
        most_tokens: of an answer; one also ends at its end token, and where prompt and answer fill the positions
            that the model has.
        beat: called after every token, as a sign of life.
    """
    samples = data.samples
    assert isinstance(samples, QASamples), "check_answerable"
    writer = Writer(model, tokenizer, most_tokens, data.device, beat)
    # Prompts of like length share a batch; the longest come first, so that a lack of memory shows at once.
    order = np.argsort(-samples.prompt_lengths, kind="stable").tolist()
    model.module.eval()
    mine: dict[int, str] = {}
    for batch in data.sampler:
        indices = [order[index % len(order)] for index in batch]
        is_padding = [index >= len(order) for index in batch]
        answers = writer.write([samples.prompt(index) for index in indices], [not padding for padding in is_padding])
        mine |= {i: answer for i, answer, padding in zip(indices, answers, is_padding, strict=True) if not padding}
    everyones = {index: answer for part in gather_to_all(mine) for index, answer in part.items()}
    found = score((everyones[index], references) for index, references in enumerate(samples.references))
    return found, {identity: everyones[index] for index, identity in enumerate(samples.ids)}


@dataclass(frozen=True)
class Writer:
    """Continues prompts, all ranks in step."""

    model: EvaluableModel
    tokenizer: Tokenizer
    most_tokens: int
    device: device
    beat: Callable[[], None]

    def write(self, prompts: Sequence[TokenIds], wanted: Sequence[bool]) -> list[str]:
        """The answer to each prompt, "" where none is wanted.

        Every rank calls it equally often, with prompts of its own; all go on until the last rank's last
        wanted answer has ended.
        """
        starts = [len(prompt) for prompt in prompts]
        capacity = _rounded_up(max(starts) + self.most_tokens)
        ids = torch.full((len(prompts), capacity), self.tokenizer.pad_id, device=self.device)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = torch.from_numpy(prompt.astype(np.int64))
        limit = max_positions(self.model.module) or capacity
        lengths = torch.tensor(starts, device=self.device)
        unfinished = torch.tensor(wanted, device=self.device)
        rows = torch.arange(len(prompts), device=self.device)
        for written in range(self.most_tokens):
            unfinished &= lengths < limit
            if not sum_over_ranks(unfinished.sum()).item():
                break
            width = min(_rounded_up(max(starts) + written), limit)
            chosen = self._next(ids[:, :width].contiguous(), lengths)
            unfinished &= chosen != self.tokenizer.eos_id
            ids[rows, lengths] = torch.where(unfinished, chosen, self.tokenizer.pad_id)
            lengths += unfinished
            self.beat()
        ends = lengths.tolist()
        return [
            self.tokenizer.decode(row[start:end]).strip()
            for row, start, end in zip(ids.tolist(), starts, ends, strict=True)
        ]

    def _next(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """The likeliest next token of each row, shape (rows,), among those that the tokenizer has."""
        mask = (torch.arange(ids.shape[1], device=self.device) < lengths[:, None]).long()
        inputs, last = {"input_ids": ids, "attention_mask": mask}, lengths - 1
        if supports_logits_to_keep(self.model.module):
            inputs[LOGITS_TO_KEEP], last = last, torch.arange(len(ids), device=self.device)
        batch = Batch(
            inputs=inputs,
            labels=torch.full_like(ids, IGNORE),
            num_samples=len(ids),
            num_targets=0,
            num_tokens=0,
        )
        logits = get_logits(self.model.forward(batch))
        following = logits[torch.arange(len(ids), device=self.device), last]
        return following[:, : self.tokenizer.size].argmax(dim=-1)


def _rounded_up(length: int) -> int:
    return -(-length // WIDTHS) * WIDTHS

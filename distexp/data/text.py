"""Token sequences in flat memory, and batches of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from distexp.config import ConfigError, DatasetConfig, ModelConfig
from distexp.config.size_checks import check_sequence_length
from distexp.data.base import IGNORE, LOGITS_TO_KEEP, Batch, Sample


@dataclass(frozen=True, eq=False)
class TokenSamples:
    """Samples ``input_ids`` and ``labels`` of shape (length,), unpadded; the prompt's labels are IGNORE.

    All sequences lie one after the other in one array, which may be a file's memory map, shared by the
    workers of a node.
    """

    tokens: NDArray[np.int32]  # (all tokens,)
    ends: NDArray[np.int64]  # (samples,) one past the last token of each
    prompt_lengths: NDArray[np.int32]  # (samples,)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = int(self.ends[index - 1]) if index else 0
        input_ids = torch.from_numpy(self.tokens[start : int(self.ends[index])].astype(np.int64))
        labels = input_ids.clone()
        labels[: int(self.prompt_lengths[index])] = IGNORE
        return {"input_ids": input_ids, "labels": labels}


@dataclass(frozen=True)
class TextCollate:
    """Pads samples on the right and stacks them.

    A causal LM predicts labels[:, 1:], so the first label of a sequence never counts as a target.
    """

    pad_id: int
    length: int | None  # tokens of every batch; None: of the batch's longest sample

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        length = self.length or max(len(sample["input_ids"]) for sample in samples)
        input_ids = _stack([sample["input_ids"] for sample in samples], length, self.pad_id)
        labels = _stack([sample["labels"] for sample in samples], length, IGNORE)
        mask = _stack([torch.ones_like(sample["input_ids"]) for sample in samples], length, 0)
        counted = labels[:, 1:] != IGNORE
        rows = counted.any(dim=1)
        return Batch(
            inputs={"input_ids": input_ids, "attention_mask": mask},
            labels=labels,
            num_samples=int(rows.sum()),
            num_targets=int(counted.sum()),
            num_tokens=int(mask[rows].sum()),
        )


@dataclass(frozen=True)
class TargetLogits:
    """A collate whose batches ask for logits only where some sample's next token is a target.

    Of the labels, shape (samples, kept), those are left that the logits at these positions predict. The first of
    them and the last logits count for nothing, as where all are kept. A position that one sample needs, all have.
    """

    collate: Callable[[Sequence[Sample]], Batch]

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        batch = self.collate(samples)
        targets = (batch.labels[:, 1:] != IGNORE).any(dim=0).nonzero().flatten()
        last = batch.labels.shape[1] - 1
        return replace(
            batch,
            inputs={**batch.inputs, LOGITS_TO_KEEP: pad(targets, (0, 1), value=last)},
            labels=batch.labels[:, pad(targets + 1, (1, 0), value=0)],
        )


def _stack(rows: Sequence[Tensor], length: int, filling: int) -> Tensor:
    return torch.stack([pad(row, (0, length - len(row)), value=filling) for row in rows])


def sequence_length(dataset: DatasetConfig, model: ModelConfig) -> int:
    """``dataset.max_length``, else ``model.seq_length``; ConfigError above the positions of the model."""
    longest = dataset.max_length or model.seq_length
    if longest is None:
        raise ConfigError("dataset.max_length is null, and texts need a longest length: set it, in tokens")
    if error := check_sequence_length(dataset, model):
        raise ConfigError(error)
    return longest

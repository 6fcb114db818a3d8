"""Token sequences in one flat array, and their batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from distexp.config import ConfigError, DatasetConfig, ModelConfig
from distexp.config.size_checks import check_sequence_length
from distexp.data.base import IGNORE, Batch, Sample


@dataclass(frozen=True, eq=False)
class TokenSamples:
    """Token sequences of different lengths, without padding.

    A sample is ``input_ids`` and ``labels`` of shape (length,); the labels of the prompt are IGNORE. All
    sequences are in one array. It may be a memory-mapped file, which the workers of a node share.

    Attributes:
        tokens: all sequences, shape (total tokens,).
        ends: one past the last token of each sequence, shape (samples,).
        prompt_lengths: tokens of each prompt, shape (samples,).
    """

    tokens: NDArray[np.int32]
    ends: NDArray[np.int64]
    prompt_lengths: NDArray[np.int32]

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
    """Collate function that pads sequences on the right.

    A causal LM predicts ``labels[:, 1:]``, so the first label of a sequence is never a target.

    Attributes:
        pad_id: token id of the padding.
        length: tokens of every batch; None: the longest sequence of each batch.
    """

    pad_id: int
    length: int | None

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """Pad and stack samples; labels have shape (batch, length)."""
        length = self.length or max(len(sample["input_ids"]) for sample in samples)
        input_ids = _pad_and_stack([sample["input_ids"] for sample in samples], length, self.pad_id)
        labels = _pad_and_stack([sample["labels"] for sample in samples], length, IGNORE)
        mask = _pad_and_stack([torch.ones_like(sample["input_ids"]) for sample in samples], length, 0)
        is_target = labels[:, 1:] != IGNORE
        has_target = is_target.any(dim=1)
        return Batch(
            inputs={"input_ids": input_ids, "attention_mask": mask},
            labels=labels,
            num_samples=int(has_target.sum()),
            num_targets=int(is_target.sum()),
            num_tokens=int(mask[has_target].sum()),
        )


def _pad_and_stack(rows: Sequence[Tensor], length: int, value: int) -> Tensor:
    """Pad rows on the right and stack them; shape (rows, length)."""
    return torch.stack([pad(row, (0, length - len(row)), value=value) for row in rows])


def sequence_length(dataset: DatasetConfig, model: ModelConfig) -> int:
    """Return ``dataset.max_length``, or ``model.seq_length`` if it is null.

    Raises:
        ConfigError: both are null, or the length exceeds the positions of the model.
    """
    length = dataset.max_length or model.seq_length
    if length is None:
        raise ConfigError("dataset.max_length is null, but text data needs a maximum length: set it, in tokens")
    if error := check_sequence_length(dataset, model):
        raise ConfigError(error)
    return length

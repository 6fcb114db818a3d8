"""Token sequences in one flat array, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distexp.config import ConfigError, DatasetConfig, ModelConfig
from distexp.config.custom_code import check_returned, describe_type
from distexp.config.size_checks import check_sequence_length
from distexp.data.base import COLLATE, IGNORE, POSITIONS, Batch, Sample, Samples, TaskData

BUCKET_MULTIPLE = 32
"""Batches of ``dataset.bucketing=true`` are padded to a multiple of it, so that their shapes repeat."""


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

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, shape (samples,)."""
        return np.diff(self.ends, prepend=0)

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


def sample_lengths(samples: Samples) -> NDArray[np.int64]:
    """Return the tokens of each sample, shape (samples,).

    Samples without an attribute ``lengths`` are read.
    """
    lengths = getattr(samples, "lengths", None)
    if lengths is None:
        lengths = [len(samples[index]["input_ids"]) for index in range(len(samples))]
    return np.asarray(lengths, dtype=np.int64)


@dataclass(frozen=True)
class TextCollate:
    """Collate function that pads sequences on the right.

    A causal LM predicts ``labels[:, 1:]``, so the first label of a sequence is never a target. Packed rows keep their
    positions, and have no attention mask: their padding counts as another sample.

    Attributes:
        pad_id: token id of the padding.
        length: tokens of every batch; None: the longest sequence of each batch.
        multiple: without ``length``, batches are padded to a multiple of it.
        limit: without ``length``, most tokens of a batch.
    """

    pad_id: int
    length: int | None
    multiple: int = 1
    limit: int | None = None

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """Pad and stack samples; labels have shape (batch, length)."""
        length = self.length or self._padded_length(max(len(sample["input_ids"]) for sample in samples))
        if POSITIONS in samples[0]:
            return self._collate_rows(samples, length)
        input_ids = self._input_ids(samples, length)
        labels = _pad_and_stack([sample["labels"] for sample in samples], length, IGNORE)
        mask = _mask([len(sample["input_ids"]) for sample in samples], length)
        is_target = labels[:, 1:] != IGNORE
        has_target = is_target.any(axis=1)
        lengths = mask.sum(axis=1)[has_target]
        return Batch(
            inputs={
                "input_ids": torch.from_numpy(input_ids),
                "attention_mask": torch.from_numpy(mask.astype(input_ids.dtype)),
            },
            labels=torch.from_numpy(labels),
            num_samples=int(has_target.sum()),
            num_targets=int(is_target.sum()),
            num_tokens=int(lengths.sum()),
            num_token_pairs=int(np.square(lengths).sum()),
        )

    def _input_ids(self, samples: Sequence[Sample], length: int) -> NDArray[Any]:
        return _pad_and_stack([sample["input_ids"] for sample in samples], length, self.pad_id)

    def _padded_length(self, longest: int) -> int:
        padded = -(-longest // self.multiple) * self.multiple
        return padded if self.limit is None else max(longest, min(padded, self.limit))

    def _collate_rows(self, rows: Sequence[Sample], length: int) -> Batch:
        """Pad and stack packed rows."""
        labels = _pad_and_stack([row["labels"] for row in rows], length, IGNORE)
        padding = np.arange(length)  # The padding is one more sample, so its positions start at 0.
        positions = np.stack([np.append(row[POSITIONS], padding)[:length] for row in rows])
        is_target = labels != IGNORE
        is_target[:, 0] = False
        samples = np.cumsum(positions == 0) - 1  # the sample at each position of the batch
        has_target = np.bincount(samples, weights=is_target.ravel()) > 0  # padding has none
        lengths = np.bincount(samples)[has_target]
        return Batch(
            inputs={
                "input_ids": torch.from_numpy(self._input_ids(rows, length)),
                POSITIONS: torch.from_numpy(positions),
            },
            labels=torch.from_numpy(labels),
            num_samples=int(has_target.sum()),
            num_targets=int(is_target.sum()),
            num_tokens=int(lengths.sum()),
            num_token_pairs=int(np.square(lengths).sum()),
        )


@dataclass(frozen=True)
class RightPadding:
    """Collate function that refuses padding on the left, which fast attention would not mask."""

    collate: Callable[[Sequence[Sample]], Batch]

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """Collate samples.

        Raises:
            ConfigError: a row has padding before a token.
        """
        batch = self.collate(samples)
        check_returned(batch, Batch, COLLATE)
        mask = batch.inputs.get("attention_mask")
        if mask is not None and _pads_before_tokens(mask):
            raise ConfigError(
                "the dataset pads on the left, but model.attention=sdpa and flex expect padding on the right: change "
                "its collate, or use model.attention=auto"
            )
        return batch


def _pads_before_tokens(mask: Tensor) -> bool:
    values = (mask.float() if mask.dtype == torch.bfloat16 else mask).numpy()  # NumPy has no bf16.
    return bool((values[:, 1:] > values[:, :-1]).any())


def check_text_collate(data: TaskData, key: str) -> TextCollate:
    """Return the collate function of the data.

    Raises:
        ConfigError: it is not a TextCollate, which ``dataset.packing`` and ``dataset.bucketing`` need.
    """
    if not isinstance(data.collate, TextCollate):
        raise ConfigError(
            f"dataset.{key}=true needs data whose collate is a distexp.data.text.TextCollate, but it is "
            f"{describe_type(data.collate)}: use TextCollate, or set dataset.{key}=false"
        )
    return data.collate


def pad_to_batch(data: TaskData, limit: int) -> TaskData:
    """Return a copy of ``data`` whose batches are padded to the longest sample, and to a multiple of BUCKET_MULTIPLE.

    Args:
        data: data of a text task.
        limit: most tokens of a batch.
    """
    collate = check_text_collate(data, "bucketing")
    return replace(data, collate=replace(collate, length=None, multiple=BUCKET_MULTIPLE, limit=limit))


def _pad_and_stack(rows: Sequence[Tensor], length: int, value: int) -> NDArray[Any]:
    """Pad rows on the right and stack them; shape (rows, length).

    A longer row is cut. This uses NumPy, because PyTorch starts threads for many operations of this size. On a busy
    machine, their start takes most of the time.
    """
    arrays = [row.numpy()[:length] for row in rows]
    padded = np.full((len(rows), length), value, dtype=np.result_type(*{array.dtype for array in arrays}))
    for target, array in zip(padded, arrays, strict=True):
        target[: len(array)] = array
    return padded


def _mask(lengths: Sequence[int], length: int) -> NDArray[np.bool_]:
    """Return which positions are no padding, shape (rows, length)."""
    return np.arange(length) < np.asarray(lengths)[:, np.newaxis]


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

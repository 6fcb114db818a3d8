"""Token sequences in one flat array, and their batches."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distexp.config import ConfigError, DatasetConfig, ModelConfig
from distexp.config.custom_code import check_returned, describe_type
from distexp.config.model_checks import check_sequence_length
from distexp.config.tasks import DECODER_LABELS, task_of
from distexp.data.base import COLLATE, IGNORE, POSITIONS, Batch, Sample, Samples, TaskData, set_epoch, to_device
from distexp.data.tokenization import Tokenizer

BUCKET_MULTIPLE = 32
"""Batches of ``dataset.bucketing=true`` are padded to a multiple of it, so that their shapes repeat."""


@dataclass(frozen=True, eq=False)
class TokenSequences:
    """Token sequences of different lengths, without padding.

    All are in one array. It may be a memory-mapped file, which the workers of a node share.
    """

    tokens: NDArray[np.int32]  # all sequences, shape (total tokens,)
    ends: NDArray[np.int64]  # one past the last token of each sequence, shape (samples,)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, shape (samples,)."""
        return np.diff(self.ends, prepend=0)

    def __len__(self) -> int:
        return len(self.ends)

    def sequence(self, index: int) -> NDArray[np.int64]:
        """Return a copy of the tokens of a sample, shape (length,)."""
        return _part(self.tokens, self.ends, index).astype(np.int64)


@dataclass(frozen=True, eq=False)
class TokenSamples(TokenSequences):
    """Samples with ``input_ids`` and ``labels`` of shape (length,). Labels that are no targets are IGNORE."""

    prompt_lengths: NDArray[np.int32]  # tokens of each prompt, shape (samples,)
    is_target: NDArray[np.bool_] | None = field(default=None, kw_only=True)
    """Whether each token is a target, shape (total tokens,); None: all but those of the prompts."""

    @property
    def target_counts(self) -> NDArray[np.int64]:
        """Targets of each sample, shape (samples,). The first token of a sample is never one."""
        if self.is_target is None:
            targets: NDArray[np.int64] = self.lengths - np.maximum(self.prompt_lengths, 1)
            return targets
        if not len(self):
            return np.zeros(0, dtype=np.int64)
        starts = self.ends - self.lengths
        counts: NDArray[np.int64] = np.add.reduceat(self.is_target, starts, dtype=np.int64) - self.is_target[starts]
        return counts

    def __getitem__(self, index: int) -> Sample:
        input_ids = torch.from_numpy(self.sequence(index))
        labels = input_ids.clone()
        if self.is_target is None:
            labels[: int(self.prompt_lengths[index])] = IGNORE
        else:
            labels[torch.from_numpy(~_part(self.is_target, self.ends, index))] = IGNORE
        return {"input_ids": input_ids, "labels": labels}


@dataclass(frozen=True, eq=False)
class LabeledTokens(TokenSequences):
    """Token sequences with a class each, with a label for each token, or with the tokens that a decoder predicts.

    A sample is ``input_ids`` of shape (length,), and ``labels`` of shape (labels,), or a scalar without ``label_ends``.
    """

    labels: NDArray[np.int64]  # all labels, shape (total labels,); IGNORE without a target
    label_ends: NDArray[np.int64] | None = None  # one past the last label of each sample; None: each has one
    for_decoder: bool = False  # the labels are also DECODER_LABELS

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, with those of a decoder, shape (samples,)."""
        lengths, decoded = super().lengths, self.label_ends if self.for_decoder else None
        return lengths if decoded is None else lengths + np.diff(decoded, prepend=0)

    def __getitem__(self, index: int) -> Sample:
        input_ids = torch.from_numpy(self.sequence(index))
        if self.label_ends is None:
            return {"input_ids": input_ids, "labels": torch.tensor(self.labels[index])}
        labels = torch.from_numpy(_part(self.labels, self.label_ends, index).copy())
        sample = {"input_ids": input_ids, "labels": labels}
        return sample | {DECODER_LABELS: labels} if self.for_decoder else sample


MASKED_SHARE = 0.15
"""Share of the tokens that a masked LM predicts. Of these 80 % are masked and 10 % random, as in BERT."""


@dataclass(frozen=True, eq=False)
class MaskedTokens(TokenSequences):
    """Token sequences of which a masked LM predicts some tokens. They change with the epoch.

    They depend on seed, epoch and index only, not on the number of workers. The epoch is in shared memory, because
    loader workers have a copy of everything else. Special tokens are never predicted.
    """

    special_ids: Sequence[int]
    mask_id: int
    vocab_size: int
    seed: int
    epoch: Tensor = field(
        default_factory=lambda: torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
    )

    def __getitem__(self, index: int) -> Sample:
        tokens = self.sequence(index)
        random = np.random.default_rng((self.seed, int(self.epoch), index))
        (usual,) = (~np.isin(tokens, self.special_ids)).nonzero()
        predicted = random.choice(usual, size=min(len(usual), max(1, round(MASKED_SHARE * len(usual)))), replace=False)
        labels = np.full_like(tokens, IGNORE)
        labels[predicted] = tokens[predicted]
        kinds = random.random(len(predicted))
        tokens[predicted[kinds < 0.8]] = self.mask_id
        others = predicted[kinds >= 0.9]
        tokens[others] = random.integers(self.vocab_size, size=len(others))
        return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}

    def set_epoch(self, epoch: int) -> None:
        """Select the predicted tokens of an epoch, in running loader workers too."""
        self.epoch.fill_(epoch)


def _part(flat: NDArray[Any], ends: NDArray[np.int64], index: int) -> NDArray[Any]:
    """Return one sequence of a flat array."""
    if not 0 <= index < len(ends):
        raise IndexError(index)
    return flat[int(ends[index - 1]) if index else 0 : int(ends[index])]


def sample_lengths(samples: Samples) -> NDArray[np.int64]:
    """Return the tokens of each sample, shape (samples,). Samples without an attribute ``lengths`` are read."""
    lengths = getattr(samples, "lengths", None)
    if lengths is None:
        lengths = [len(samples[index]["input_ids"]) for index in range(len(samples))]
    return np.asarray(lengths, dtype=np.int64)


@dataclass(frozen=True)
class TextCollate:
    """Collate function that pads sequences on the right.

    A causal LM predicts ``labels[:, 1:]``, so the first label of a sequence is never a target. Packed rows keep their
    positions, and have no attention mask: their padding counts as another sample. Of other tasks each label is a
    target. The labels of seq2seq samples have another length, and are also the input DECODER_LABELS.
    """

    pad_id: int  # token id of the padding
    length: int | None  # tokens of every batch; None: the longest sequence of each batch
    multiple: int = 1  # without ``length``, batches are padded to a multiple of it
    limit: int | None = None  # without ``length``, most tokens of a batch
    task: str = "causal_lm"
    decoder_length: int | None = None  # labels of every batch of a seq2seq task; None: the longest of each batch

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """Pad and stack samples; labels have shape (batch, length), or (batch,) if a sample has one."""
        length = self._padded_length(self.length, [len(sample["input_ids"]) for sample in samples])
        input_ids = _pad_and_stack([sample["input_ids"] for sample in samples], length, self.pad_id)
        if POSITIONS in samples[0]:
            return self._collate_rows(samples, input_ids)
        mask = np.arange(length) < np.asarray([len(sample["input_ids"]) for sample in samples])[:, np.newaxis]
        inputs, lengths = {"input_ids": input_ids, "attention_mask": mask.astype(input_ids.dtype)}, mask.sum(axis=1)
        task, labels = task_of(self.task), [sample["labels"] for sample in samples]
        if not task.labels_tokens:
            stacked = np.stack([label.numpy() for label in labels])
            return _make_batch(inputs, stacked, stacked != IGNORE, lengths[stacked != IGNORE])
        if DECODER_LABELS in task.inputs:
            decoded = [sample[DECODER_LABELS] for sample in samples]
            length = self._padded_length(self.decoder_length, list(map(len, decoded)))
            inputs[DECODER_LABELS] = _pad_and_stack(decoded, length, IGNORE)
            lengths = lengths + (inputs[DECODER_LABELS] != IGNORE).sum(axis=1)
        padded = _pad_and_stack(labels, length, IGNORE)
        is_target = padded[:, 1:] != IGNORE if task.is_causal else padded != IGNORE
        return _make_batch(inputs, padded, is_target, lengths[is_target.any(axis=1)])

    def _padded_length(self, fixed: int | None, lengths: Sequence[int]) -> int:
        """Return the length of a batch whose samples have these lengths."""
        if fixed is not None:
            return fixed
        longest = max(lengths)
        padded = -(-longest // self.multiple) * self.multiple
        return padded if self.limit is None else max(longest, min(padded, self.limit))

    def _collate_rows(self, rows: Sequence[Sample], input_ids: NDArray[Any]) -> Batch:
        length = input_ids.shape[1]
        labels = _pad_and_stack([row["labels"] for row in rows], length, IGNORE)
        padding = np.arange(length)  # The padding is one more sample, so its positions start at 0.
        positions = np.stack([np.append(row[POSITIONS], padding)[:length] for row in rows])
        is_target = labels != IGNORE
        is_target[:, 0] = False
        samples = np.cumsum(positions == 0) - 1  # the sample at each position of the batch
        has_target = np.bincount(samples, weights=is_target.ravel()) > 0  # padding has none
        inputs = {"input_ids": input_ids, POSITIONS: positions}
        return _make_batch(inputs, labels, is_target, np.bincount(samples)[has_target])


def _make_batch(
    inputs: dict[str, NDArray[Any]], labels: NDArray[Any], is_target: NDArray[Any], lengths: NDArray[Any]
) -> Batch:
    """Return a batch of samples; ``lengths`` has the tokens of those with a target."""
    return Batch(
        inputs={name: torch.from_numpy(array) for name, array in inputs.items()},
        labels=torch.from_numpy(labels),
        num_samples=len(lengths),
        num_targets=int(is_target.sum()),
        num_tokens=int(lengths.sum()),
        num_token_pairs=int(np.square(lengths).sum()),
    )


def text_data(
    dataset: DatasetConfig,
    tokenizer: Tokenizer,
    sets: Sequence[Samples],
    *,
    length: int,
    notes: Iterable[str],
    task: str = "causal_lm",
    classes: Iterable[str] = (),
    decoder_length: int | None = None,
) -> TaskData:
    """Return the data of a task: sets for training and evaluation, padded to ``length`` tokens if that is chosen."""
    train, evaluation = sets
    names, is_fixed = tuple(classes), dataset.padding == "max_length"
    lengths = (length, decoder_length) if is_fixed else (None, None)
    return TaskData(
        task=task,
        train=train,
        evaluation=evaluation,
        collate=TextCollate(tokenizer.pad_id, lengths[0], task=task, decoder_length=lengths[1]),
        num_classes=len(names) or tokenizer.size,
        tokenizer=tokenizer,
        tokenizer_name=tokenizer.name,
        class_names=names,
        notes=list(notes),
    )


@dataclass(frozen=True)
class RightPadding:
    """Collate function that refuses padding on the left, which fast attention would not mask."""

    collate: Callable[[Sequence[Sample]], Batch]

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """Collate samples. Raise ConfigError if a row has padding before a token."""
        batch = self.collate(samples)
        check_returned(batch, Batch, COLLATE)
        mask = batch.inputs.get("attention_mask")
        mask = mask.float() if mask is not None and mask.dtype == torch.bfloat16 else mask  # NumPy has no bf16.
        if mask is not None and (mask.numpy()[:, 1:] > mask.numpy()[:, :-1]).any():
            raise ConfigError(
                "the dataset pads on the left, but model.attention=sdpa and flex expect padding on the right: change "
                "its collate, or use model.attention=auto"
            )
        return batch


def check_text_collate(data: TaskData, key: str) -> TextCollate:
    """Return the collate function of the data. Raise ConfigError if it is not a TextCollate."""
    if not isinstance(data.collate, TextCollate):
        raise ConfigError(
            f"dataset.{key}=true needs data whose collate is a distexp.data.text.TextCollate, but it is "
            f"{describe_type(data.collate)}: use TextCollate, or set dataset.{key}=false"
        )
    return data.collate


def pad_to_batch(data: TaskData, limit: int) -> TaskData:
    """Return a copy of ``data`` with batches padded to the longest sample, and to a multiple of BUCKET_MULTIPLE."""
    collate = check_text_collate(data, "bucketing")
    collate = replace(collate, decoder_length=None)
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


def sequence_length(dataset: DatasetConfig, model: ModelConfig) -> int:
    """Return ``dataset.max_length``, or ``model.seq_length`` if it is null. Raise ConfigError if it does not fit."""
    length = dataset.max_length or model.seq_length
    if length is None:
        raise ConfigError("dataset.max_length is null, but text data needs a maximum length: set it, in tokens")
    if error := check_sequence_length(dataset, model):
        raise ConfigError(error)
    return length


@dataclass(frozen=True, eq=False)
class PackedSamples:
    """Rows of several samples each. They are the same for any number of workers and in all epochs; their order changes.

    A row is ``input_ids``, ``labels`` and ``position_ids`` of shape (length,). By its positions the model keeps the
    samples apart. The first label of each sample is IGNORE, because the sample before it must not predict it.
    """

    samples: Samples
    rows: Sequence[Sequence[int]]  # indices of the samples in each row

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Sample:
        if not 0 <= row < len(self):
            raise IndexError(row)
        parts = [self.samples[index] for index in self.rows[row]]
        labels = [part["labels"].clone() for part in parts]
        for label in labels:
            label[0] = IGNORE
        return {
            "input_ids": torch.cat([part["input_ids"] for part in parts]),
            "labels": torch.cat(labels),
            POSITIONS: torch.cat([torch.arange(len(label)) for label in labels]),
        }

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the samples."""
        set_epoch(self.samples, epoch)

    def to_device(self, batch: Batch, device: torch.device) -> Batch:
        """Return a batch on a device, as the samples place it."""
        return to_device(self.samples, batch, device)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Samples of each row, shape (rows,)."""
        return np.fromiter(map(len, self.rows), dtype=np.int64, count=len(self.rows))


def pack_training_set(data: TaskData, length: int, seed: int) -> TaskData:
    """Return a copy of ``data`` with packed training samples and a note. Raise ConfigError if they do not fit."""
    check_text_collate(data, "packing")
    lengths = sample_lengths(data.train)
    if (longest := int(lengths.max())) > length:
        raise ConfigError(
            f"dataset.packing=true makes rows of {length} tokens, but a training sample has {longest}: raise "
            "dataset.max_length, or cut the samples in the dataset"
        )
    rows = assign_rows(lengths, length, seed)
    padding = 1 - lengths.sum() / (len(rows) * length)
    note = f"packing: {len(lengths)} samples are in {len(rows)} rows of {length} tokens with {padding:.1%} padding"
    return replace(data, train=PackedSamples(data.train, rows), notes=[*data.notes, note])


def assign_rows(lengths: NDArray[np.int64], capacity: int, seed: int) -> list[list[int]]:
    """Assign samples to rows, the longest first, each to the fullest row with room; return their indices by row.

    This is best-fit decreasing bin packing (Johnson, *Near-Optimal Bin Packing Algorithms*, MIT 1973). ``seed`` orders
    samples of the same length.
    """
    shuffled = np.random.default_rng(seed).permutation(len(lengths))
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    rows: list[list[int]] = []
    by_free: dict[int, list[int]] = defaultdict(list)  # rows by their free tokens
    free_tokens = 0  # bit f is set if a row has f free tokens, so that the fullest row with room is found at once
    for index in order.tolist():
        length = int(lengths[index])
        fitting = free_tokens >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1
            row = by_free[free].pop()
            if not by_free[free]:
                free_tokens &= ~(1 << free)
        else:
            free, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        by_free[free - length].append(row)
        free_tokens |= 1 << (free - length)
    return rows

"""Interfaces between data sets and the training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

COLLATE = "collate of the dataset"
"""Name of the collate function in messages."""

IGNORE = -100
"""Label that the loss ignores: prompts, padding tokens and padding samples have it."""

LOGITS_TO_KEEP = "logits_to_keep"
"""Input name of causal LMs in transformers: the positions to compute logits for, shape (kept,)."""

TARGET_POSITIONS = "target_positions"
"""Input name of a model with ``train.logits=targets``: indices into batch x length, shape (kept,)."""

TARGET_LABELS = "target_labels"
"""Input name of a model with ``train.loss=chunked``: the labels of the batch."""

POSITIONS = "position_ids"
"""Input name of the positions in packed rows, shape (batch, length). Each sample starts at 0."""

MODEL_INPUTS = {"causal_lm": ("input_ids", "attention_mask"), "image_classification": ("images",)}
"""Names of the inputs that the datasets of distexp have, by task. A custom dataset may have others."""

Sample = Mapping[str, Tensor]
"""One example: the model's inputs by name, and ``labels``."""


class Samples(Protocol):
    """A data set with random access by index.

    It may have ``set_epoch(epoch)``, called before each epoch in every process that reads samples, and ``to_device``,
    see the function ``to_device``. With packing or bucketing, the length of a sample must be the same in all epochs.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


@dataclass(frozen=True)
class Batch:
    """The samples of one micro-batch.

    Attributes:
        inputs: keyword arguments of the model: ``input_ids`` and ``attention_mask`` of shape
            (batch, length), or ``images`` of shape (batch, 3, height, width).
        labels: shape (batch, length) or (batch,); IGNORE if a position has no target.
        num_samples: samples with at least one target.
        num_targets: labels that count towards the loss.
        num_tokens: input tokens of these samples without padding; 0 for images.
        num_token_pairs: sum of the squares of their lengths. 0: unknown, then equal lengths are assumed for FLOPs.
    """

    inputs: dict[str, Tensor]
    labels: Tensor
    num_samples: int
    num_targets: int
    num_tokens: int
    num_token_pairs: int = 0

    @property
    def num_positions(self) -> int:
        """Input positions with padding; 0 if there are no tokens, as for images."""
        tokens = self.inputs.get("input_ids")
        return 0 if tokens is None else tokens.numel()

    def to(self, device: torch.device) -> Batch:
        """Return a copy on ``device``. The copy is asynchronous if the batch is pinned."""
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in self.inputs.items()}
        return replace(self, inputs=inputs, labels=self.labels.to(device, non_blocking=True))

    def cast_inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the inputs with those in floating point, such as images, in another type."""
        return {name: each.to(dtype) if each.is_floating_point() else each for name, each in self.inputs.items()}

    def pin_memory(self) -> Batch:
        """Return a copy in page-locked memory. DataLoader calls this method by its name."""
        inputs = {name: tensor.pin_memory() for name, tensor in self.inputs.items()}
        return replace(self, inputs=inputs, labels=self.labels.pin_memory())


def set_epoch(samples: Samples, epoch: int) -> None:
    """Call ``set_epoch`` of a data set, if it has one."""
    setter: Callable[[int], None] | None = getattr(samples, "set_epoch", None)
    if setter is not None:
        setter(epoch)


def to_device(samples: Samples, batch: Batch, device: torch.device) -> Batch:
    """Return a batch of a data set on a device, ready for the model.

    A data set whose batches are finished on the device has a method ``to_device(batch, device)`` for this.
    """
    finish: Callable[[Batch, torch.device], Batch] | None = getattr(samples, "to_device", None)
    return batch.to(device) if finish is None else finish(batch, device)


@dataclass(frozen=True)
class TaskData:
    """The data of a task, and the properties that a model needs.

    Attributes:
        task: ``causal_lm`` or ``image_classification``.
        collate: makes a batch from samples.
        num_classes: number of classes, or size of the tokenizer's vocabulary.
        tokenizer: a ``distexp.data.tokenization.Tokenizer``; None for images.
        tokenizer_name: ``byte(1024)``, or the name or path of a Hugging Face tokenizer.
        notes: messages for the user, for example about examples that were left out.
    """

    task: str
    train: Samples
    evaluation: Samples
    collate: Callable[[Sequence[Sample]], Batch]
    num_classes: int
    tokenizer: Any = None
    tokenizer_name: str | None = None
    notes: list[str] = field(default_factory=list)

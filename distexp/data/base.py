"""What the loop knows of data: batches, and the pair of a training and an evaluation set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor, device

IGNORE = -100
"""The label that no loss counts: padding, prompts, and samples that only fill a batch."""

LOGITS_TO_KEEP = "logits_to_keep"
"""An input of causal LMs, by transformers' name: the positions whose logits are wanted, shape (kept,)."""

Sample = Mapping[str, Tensor]
"""One example: what the model takes, and its ``labels``."""


class Samples(Protocol):
    """A data set addressed by position."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


@dataclass(frozen=True)
class Batch:
    """The samples that a worker sees at once.

    ``inputs`` are the keyword arguments of the model: ``input_ids`` and ``attention_mask`` of shape
    (samples, length), or ``images`` of shape (samples, 3, height, width). ``labels`` have shape
    (samples, length) or (samples,), IGNORE where nothing is to be learnt.
    """

    inputs: dict[str, Tensor]
    labels: Tensor
    samples: int  # that count: with a label that is not IGNORE
    targets: int  # labels that count towards the loss
    tokens: int  # input tokens without padding, of the samples that count; 0 for images

    def to(self, where: device) -> Batch:
        """The same batch on a device; the copy overlaps with computation where memory is pinned."""
        inputs = {name: tensor.to(where, non_blocking=True) for name, tensor in self.inputs.items()}
        return replace(self, inputs=inputs, labels=self.labels.to(where, non_blocking=True))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory; DataLoader calls it by this name."""
        inputs = {name: tensor.pin_memory() for name, tensor in self.inputs.items()}
        return replace(self, inputs=inputs, labels=self.labels.pin_memory())


@dataclass(frozen=True)
class TaskData:
    """A training set, an evaluation set, and what a model must know of them."""

    task: str  # causal_lm or image_classification
    train: Samples
    evaluation: Samples
    collate: Callable[[Sequence[Sample]], Batch]
    num_classes: int  # classes, or entries of the vocabulary
    tokenizer: Any = None
    tokenizer_name: str | None = None  # "byte(1024)", or the name or path it was loaded from
    notes: list[str] = field(default_factory=list)  # what the user must be told: examples left out, say

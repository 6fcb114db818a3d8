"""Interfaces between data sets and the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from numbers import Integral
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from distexp.config import ConfigError
from distexp.config.custom_code import PAGE, check_returned, describe_type
from distexp.config.tasks import DECODER_LABELS, TASKS

COLLATE = "collate of the dataset"

IGNORE = -100
"""Label that the loss ignores: prompts, padding tokens and padding samples have it."""

LOGITS_TO_KEEP = "logits_to_keep"
"""Input name of causal LMs in transformers: the positions to compute logits for, shape (kept,)."""

TARGET_POSITIONS = "target_positions"
"""Input name of a model with ``train.logits=targets``: indices into batch x length, shape (kept,)."""

TARGET_LABELS = "target_labels"
"""Input name of a model with ``train.loss=chunked`` or ``own``: the labels of the batch."""

POSITIONS = "position_ids"
"""Input name of the positions in packed rows, shape (batch, length). Each sample starts at 0."""

TOKEN_INPUTS = ("input_ids", DECODER_LABELS)
"""Names of the inputs whose positions count as tokens."""

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
class TokenSlice:
    """The tokens of each row of which one of several workers computes the hidden states and logits."""

    rank: int  # of the worker among those with the same rows
    workers: int

    def of(self, length: int) -> slice:
        """Return the positions of the tokens. Raise ConfigError if the workers cannot have equally many."""
        if length % self.workers:
            raise ConfigError(
                f"parallel.context={self.workers} must divide the {length} tokens of a row: use dataset.padding="
                f"max_length and dataset.max_length={-(-length // self.workers) * self.workers}, or parallel.context=1"
            )
        width = length // self.workers
        return slice(self.rank * width, (self.rank + 1) * width)


@dataclass(frozen=True)
class Batch:
    """The samples of one micro-batch.

    The ``inputs`` are the keyword arguments of the model: ``input_ids`` and ``attention_mask`` of shape (batch,
    length), or ``images`` of shape (batch, 3, height, width).
    """

    inputs: dict[str, Tensor]
    labels: Tensor  # shape (batch, length) or (batch,); IGNORE if a position has no target
    num_samples: int  # samples with at least one target
    num_targets: int  # labels that count towards the loss
    num_tokens: int  # input tokens of these samples without padding; 0 for images
    num_token_pairs: int = 0  # sum of the squares of their lengths; 0: unknown, and equal lengths are assumed
    own: TokenSlice | None = None  # tokens whose logits this worker computes; None: all. Inputs and labels are whole.

    @property
    def num_positions(self) -> int:
        """Input positions with padding, also of a decoder; 0 if there are no tokens, as for images."""
        return sum(self.inputs[name].numel() for name in TOKEN_INPUTS if name in self.inputs)

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
    """The data of a task, and the properties that a model needs."""

    task: str  # a key of ``distexp.config.tasks.TASKS``
    train: Samples
    evaluation: Samples
    collate: Callable[[Sequence[Sample]], Batch]  # makes a batch from samples
    num_classes: int  # number of classes, or size of the tokenizer's vocabulary
    tokenizer: Any = None  # a ``distexp.data.tokenization.Tokenizer``; None for images
    tokenizer_name: str | None = None  # ``byte(1024)``, or the name or path of a Hugging Face tokenizer
    class_names: Sequence[str] = ()  # names of the classes, for a saved model; empty: they are numbered
    notes: list[str] = field(default_factory=list)  # for the user, for example about examples that were left out


def check_task_data(data: TaskData, task: str, source: str) -> None:
    """Check the fields of a TaskData. Raise ConfigError with one message for each wrong field."""
    wrong = [
        f"{name} is {describe_type(samples)} without __len__ or __getitem__"
        for name, samples in (("train", data.train), ("evaluation", data.evaluation))
        if not (hasattr(type(samples), "__len__") and hasattr(type(samples), "__getitem__"))
    ]
    collate: Any = data.collate
    classes: Any = data.num_classes
    if not callable(collate):
        wrong.append(f"collate is {describe_type(collate)}, which cannot be called")
    if (counted := getattr(collate, "task", task)) != task and counted in TASKS:  # Other labels are targets.
        right = f"{type(collate).__name__}(..., task={task!r}) does"
        wrong.append(f"collate counts the targets of {counted} and not those of {task}, as {right}")
    if not isinstance(classes, Integral):
        wrong.append(f"num_classes is {describe_type(classes)} and not an int")
    if data.task != task:
        wrong.append(f"task is {data.task!r}, but the task of the model is {task!r}")
    if wrong:
        raise ConfigError([f"{source} returned a TaskData whose {text}: correct it, as in {PAGE}" for text in wrong])


class TooFewSamplesError(ConfigError):
    """A size of a data set is more than its samples. ``key`` is train or eval, and ``available`` is more than 0."""

    def __init__(self, error: str, key: str, available: int) -> None:
        super().__init__(error)
        self.key, self.available = key, available


def check_size(key: str, size: int | None, available: int, name: str) -> None:
    """Raise ConfigError if ``dataset.train_size`` or ``eval_size`` is more than the available samples."""
    if size is None or size <= available:
        return
    if not available:
        raise ConfigError(f"the data have no {name}, but dataset.{key}_size={size}: use other data")
    raise TooFewSamplesError(
        f"dataset.{key}_size={size} is more than the {available} {name} of the data: set at most {available}, or null "
        "for all",
        key,
        available,
    )


def check_not_empty(data: TaskData, *, evaluates: bool) -> None:
    """Raise ConfigError if the training set has no samples, or the evaluation set of a run that evaluates."""
    left_out = f" ({'; '.join(data.notes)})" if data.notes else ""
    if not len(data.train):
        raise ConfigError(f"the training set has no sample{left_out}: correct the data, or choose other data")
    if evaluates and not len(data.evaluation):
        raise ConfigError(f"the evaluation set has no sample{left_out}: correct the data, or set train.evaluate=false")


KEPT_MULTIPLE = 8
"""The number of kept tokens is a multiple of it, as matrix products on a GPU are faster then."""

COMPILED_MULTIPLE = 128
"""The same for compiled models. Few shapes may occur, because each of them is compiled."""


@dataclass(frozen=True)
class TargetTokens:
    """Collate function for ``train.logits=targets``: only tokens that predict a target are kept.

    The batch gets an input TARGET_POSITIONS of shape (kept,), and its labels have shape (1, kept). As with all logits,
    the logits of a token predict the next label, and those of the last token predict nothing. ``kept_tokens`` is the
    number of kept tokens. The added ones have position 0 and no target. ``max_targets`` has the most targets of a
    batch, by its number of samples. All batches keep as many tokens as that one, so they have one shape.
    """

    collate: Callable[[Sequence[Sample]], Batch]
    compiled: bool = False  # whether the model is compiled
    max_targets: Mapping[int, int] = field(default_factory=dict)

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """Collate samples, and select their targets."""
        batch = self.collate(samples)
        check_returned(batch, Batch, COLLATE)
        following = np.full_like(batch.labels.numpy(), IGNORE)
        following[:, :-1] = batch.labels.numpy()[:, 1:]
        next_labels = following.ravel()  # the label that each token predicts; the last one of a row predicts nothing
        (found,) = (next_labels != IGNORE).nonzero()
        most = max(len(found), self.max_targets.get(len(samples), 0))
        kept = kept_tokens(most, len(next_labels), compiled=self.compiled)
        positions = np.zeros(kept, dtype=np.int64)
        positions[: len(found)] = found
        labels = np.full((1, kept), IGNORE, dtype=next_labels.dtype)
        labels[0, 1 : len(found) + 1] = next_labels[found[: kept - 1]]
        return replace(
            batch,
            inputs={**batch.inputs, TARGET_POSITIONS: torch.from_numpy(positions)},
            labels=torch.from_numpy(labels),
        )


@dataclass(frozen=True)
class LabelsForHead:
    """Collate function for ``train.loss=chunked`` and ``own``: the labels are also an input of the model."""

    collate: Callable[[Sequence[Sample]], Batch]

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """Collate samples, and add the input TARGET_LABELS."""
        batch = self.collate(samples)
        check_returned(batch, Batch, COLLATE)
        return replace(batch, inputs={**batch.inputs, TARGET_LABELS: batch.labels})


@dataclass(frozen=True)
class SharedRows:
    """Collate function for ``parallel.context``: the batch states which tokens of its rows this worker has."""

    collate: Callable[[Sequence[Sample]], Batch]
    own: TokenSlice

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """Collate samples. The loss of this worker is that of its own tokens."""
        batch = self.collate(samples)
        check_returned(batch, Batch, COLLATE)
        return replace(batch, own=self.own)


def kept_tokens(targets: int, tokens: int, *, compiled: bool) -> int:
    """Return how many tokens to keep: more than ``targets``, but at most all ``tokens``.

    For compiled models it is a multiple of COMPILED_MULTIPLE, and of a power of two above an eighth of ``targets``. So
    batches whose numbers of targets differ by a tenth have two or three shapes. At most a quarter is added.
    """
    multiple = max(COMPILED_MULTIPLE, 1 << max(0, targets.bit_length() - 3)) if compiled else KEPT_MULTIPLE
    return min(-(-(targets + 1) // multiple) * multiple, tokens)


BLOCK = 128
"""Queries and keys of a block of flex attention on a GPU, see ``create_block_mask``."""


@dataclass(frozen=True)
class Workload:
    """Sizes of batches. Those of tokens are 0 for images."""

    samples: int = 0  # samples with targets. A packed row has several.
    tokens: int = 0  # their tokens, without padding
    token_pairs: int = 0  # sum of the squares of their lengths
    targets: int = 0  # labels that count towards the loss
    rows: int = 0  # rows of the batches, with padding samples
    positions: int = 0  # their tokens, with padding
    position_pairs: int = 0  # sum of the squares of the lengths of the rows
    visited_pairs: int = 0  # those of ``position_pairs`` in blocks that flex attention does not skip on a GPU
    head_tokens: int = 0  # tokens whose logits are computed

    def __add__(self, other: Workload) -> Workload:
        return Workload(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def measure_workload(batches: Iterable[Batch]) -> Workload:
    """Return the sizes of batches in CPU memory."""
    return sum(map(_workload_of, batches), start=Workload())


def _workload_of(batch: Batch) -> Workload:
    if not batch.num_positions:
        return Workload(samples=batch.num_samples, targets=batch.num_targets, rows=len(batch.labels))
    rows = len(batch.inputs["input_ids"])
    length = batch.num_positions // rows
    kept = batch.inputs.get(TARGET_POSITIONS)
    return Workload(
        samples=batch.num_samples,
        tokens=batch.num_tokens,
        token_pairs=batch.num_token_pairs or batch.num_tokens**2 // max(1, batch.num_samples),
        targets=batch.num_targets,
        rows=rows,
        positions=rows * length,
        position_pairs=rows * length**2,
        visited_pairs=_visited_pairs(rows, length, batch.inputs.get(POSITIONS)),
        head_tokens=batch.labels.numel() if kept is None else kept.numel(),
    )


def _visited_pairs(rows: int, length: int, positions: Tensor | None) -> int:
    """Return the pairs of queries and keys in blocks that flex attention visits."""
    starts = torch.arange(0, length, BLOCK)
    ends = (starts + BLOCK).clamp(max=length)
    first = torch.zeros(rows, len(starts), dtype=torch.long)  # the first key that a block of queries needs
    if positions is not None:
        first = starts - positions[:, ::BLOCK]
    visited_keys = ends - first // BLOCK * BLOCK
    return int(((ends - starts) * visited_keys).sum())

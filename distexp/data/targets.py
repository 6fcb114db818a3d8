"""Collate functions that pass the targets of a batch to the output head of a causal LM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distexp.config.custom_code import check_returned
from distexp.data.base import COLLATE, IGNORE, TARGET_LABELS, TARGET_POSITIONS, Batch, Sample

KEPT_MULTIPLE = 8
"""The number of kept tokens is a multiple of it, as matrix products on a GPU are faster then."""

COMPILED_MULTIPLE = 128
"""The same for compiled models. Few shapes may occur, because each of them is compiled."""


@dataclass(frozen=True)
class TargetTokens:
    """Collate function for ``train.logits=targets``: only tokens that predict a target are kept.

    The batch gets an input TARGET_POSITIONS of shape (kept,), and its labels have shape (1, kept). As with all logits,
    the logits of a token predict the next label, and those of the last token predict nothing. ``kept_tokens`` is the
    number of kept tokens. The added ones have position 0 and no target.

    Attributes:
        compiled: whether the model is compiled.
        max_targets: the most targets of a batch, by its number of samples. All batches keep as many tokens as that one,
            so they have one shape.
    """

    collate: Callable[[Sequence[Sample]], Batch]
    compiled: bool = False
    max_targets: Mapping[int, int] = field(default_factory=dict)

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """Collate samples, and select their targets."""
        batch = self.collate(samples)
        check_returned(batch, Batch, COLLATE)
        next_labels = _next_labels(batch.labels.numpy())
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


def _next_labels(labels: NDArray[Any]) -> NDArray[Any]:
    """Return the label that each token predicts, shape (tokens,); the last one of a row predicts nothing."""
    following = np.full_like(labels, IGNORE)
    following[:, :-1] = labels[:, 1:]
    return following.ravel()


@dataclass(frozen=True)
class LabelsForHead:
    """Collate function for ``train.loss=chunked``: the labels are also an input of the model."""

    collate: Callable[[Sequence[Sample]], Batch]

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """Collate samples, and add the input TARGET_LABELS."""
        batch = self.collate(samples)
        check_returned(batch, Batch, COLLATE)
        return replace(batch, inputs={**batch.inputs, TARGET_LABELS: batch.labels})


def kept_tokens(targets: int, tokens: int, *, compiled: bool) -> int:
    """Return how many tokens to keep: more than ``targets``, but at most all ``tokens``.

    For compiled models it is a multiple of COMPILED_MULTIPLE, and of a power of two above an eighth of ``targets``. So
    batches whose numbers of targets differ by a tenth have two or three shapes. At most a quarter is added.
    """
    multiple = max(COMPILED_MULTIPLE, 1 << max(0, targets.bit_length() - 3)) if compiled else KEPT_MULTIPLE
    return min(-(-(targets + 1) // multiple) * multiple, tokens)

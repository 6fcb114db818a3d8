"""Collate functions that pass the targets of a batch to the output head of a causal LM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch.nn.functional import pad

from distexp.config.custom_code import check_returned
from distexp.data.base import COLLATE, IGNORE, TARGET_LABELS, TARGET_POSITIONS, Batch, Sample

KEPT_MULTIPLE = 128
"""The number of kept tokens is a multiple of it, so that few shapes occur and compiled graphs are used again."""


@dataclass(frozen=True)
class TargetTokens:
    """Collate function for ``train.logits=targets``: only tokens that predict a target are kept.

    The batch gets an input TARGET_POSITIONS of shape (kept,), and its labels have shape (1, kept). As with all logits,
    the logits of a token predict the next label, and those of the last token predict nothing. ``kept_tokens`` is the
    number of kept tokens. The added ones have position 0 and no target.
    """

    collate: Callable[[Sequence[Sample]], Batch]

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """Collate samples, and select their targets."""
        batch = self.collate(samples)
        check_returned(batch, Batch, COLLATE)
        next_labels = pad(batch.labels[:, 1:], (0, 1), value=IGNORE).flatten()
        positions = (next_labels != IGNORE).nonzero().flatten()
        targets = len(positions)
        kept = kept_tokens(targets, len(next_labels))
        return replace(
            batch,
            inputs={**batch.inputs, TARGET_POSITIONS: pad(positions, (0, kept - targets))},
            labels=pad(next_labels[positions], (1, kept - targets - 1), value=IGNORE)[None],
        )


@dataclass(frozen=True)
class LabelsForHead:
    """Collate function for ``train.loss=chunked``: the labels are also an input of the model."""

    collate: Callable[[Sequence[Sample]], Batch]

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """Collate samples, and add the input TARGET_LABELS."""
        batch = self.collate(samples)
        check_returned(batch, Batch, COLLATE)
        return replace(batch, inputs={**batch.inputs, TARGET_LABELS: batch.labels})


def kept_tokens(targets: int, tokens: int) -> int:
    """Return how many tokens to keep: more than ``targets``, but at most all ``tokens``.

    It is a multiple of KEPT_MULTIPLE. From 16 times that many on, it is a multiple of a power of two between a 16th and
    an 8th of the number. So at most an eighth is added, and similar batches have the same shape.
    """
    multiple = max(KEPT_MULTIPLE, 1 << max(0, targets.bit_length() - 4))
    return min(-(-(targets + 1) // multiple) * multiple, tokens)

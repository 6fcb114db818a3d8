"""Sizes of batches, from which their FLOPs follow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from distexp.data.base import POSITIONS, TARGET_POSITIONS, Batch

BLOCK = 128
"""Queries and keys of a block of flex attention on a GPU, see ``create_block_mask``."""


@dataclass(frozen=True)
class Workload:
    """Sizes of batches. Those of tokens are 0 for images.

    Attributes:
        samples: samples with targets. A packed row has several.
        tokens: their tokens, without padding.
        token_pairs: sum of the squares of their lengths.
        targets: labels that count towards the loss.
        rows: rows of the batches, with padding samples.
        positions: their tokens, with padding.
        position_pairs: sum of the squares of the lengths of the rows.
        visited_pairs: those of ``position_pairs`` in blocks that flex attention does not skip on a GPU.
        head_tokens: tokens whose logits are computed.
    """

    samples: int = 0
    tokens: int = 0
    token_pairs: int = 0
    targets: int = 0
    rows: int = 0
    positions: int = 0
    position_pairs: int = 0
    visited_pairs: int = 0
    head_tokens: int = 0

    def __add__(self, other: Workload) -> Workload:
        return Workload(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def measure_workload(batches: Iterable[Batch]) -> Workload:
    """Return the sizes of batches in CPU memory."""
    return sum(map(_workload_of, batches), start=Workload())


def _workload_of(batch: Batch) -> Workload:
    if not batch.num_positions:
        return Workload(samples=batch.num_samples, targets=batch.num_targets, rows=len(batch.labels))
    rows, length = batch.inputs["input_ids"].shape
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
        head_tokens=rows * length if kept is None else kept.numel(),
    )


def _visited_pairs(rows: int, length: int, positions: Tensor | None) -> int:
    """Return the pairs of queries and keys in blocks that flex attention visits.

    Args:
        rows: rows of the batch.
        length: tokens of a row.
        positions: positions in the documents of packed rows, shape (rows, length).
    """
    starts = torch.arange(0, length, BLOCK)
    ends = (starts + BLOCK).clamp(max=length)
    first = torch.zeros(rows, len(starts), dtype=torch.long)  # the first key that a block of queries needs
    if positions is not None:
        first = starts - positions[:, ::BLOCK]
    visited_keys = ends - first // BLOCK * BLOCK
    return int(((ends - starts) * visited_keys).sum())

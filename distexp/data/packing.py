"""Packing: several samples in one row.

Rows are the same for any number of workers. Each row has the positions of its samples, by which the model keeps them
apart. The rows of all epochs are the same; their order changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from distexp.config import ConfigError
from distexp.data.base import IGNORE, POSITIONS, Batch, Sample, Samples, TaskData, set_epoch, to_device
from distexp.data.text import check_text_collate, sample_lengths


@dataclass(frozen=True, eq=False)
class PackedSamples:
    """Rows of samples.

    A row is ``input_ids``, ``labels`` and ``position_ids`` of shape (length,). The first label of each sample is
    IGNORE, because the sample before it must not predict it.

    Attributes:
        samples: the samples.
        rows: indices of the samples in each row.
    """

    samples: Samples
    rows: Sequence[Sequence[int]]

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
    """Return a copy of ``data`` with packed training samples and a note about them.

    Args:
        data: data of a text task.
        length: most tokens of a row.
        seed: seed of the order of samples of the same length.

    Raises:
        ConfigError: the collate function of the data cannot pad rows, or a sample is longer than a row.
    """
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
    """Assign samples to rows: the longest first, each to the fullest row that has room.

    This is best-fit decreasing bin packing (Johnson, *Near-Optimal Bin Packing Algorithms*, MIT 1973).

    Args:
        lengths: tokens of each sample, at most ``capacity``.
        capacity: most tokens of a row.
        seed: seed of the order of samples of the same length.

    Returns:
        Indices of the samples in each row.
    """
    shuffled = np.random.default_rng(seed).permutation(len(lengths))
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    rows: list[list[int]] = []
    open_rows = _OpenRows()
    for index in order.tolist():
        length = int(lengths[index])
        free = open_rows.least_free(length)
        if free is None:
            free, row = capacity, len(rows)
            rows.append([])
        else:
            row = open_rows.pop(free)
        rows[row].append(index)
        open_rows.add(row, free - length)
    return rows


class _OpenRows:
    """Rows by their free tokens. Finding the fullest row with room takes the same time for any number of rows."""

    def __init__(self) -> None:
        self._rows: dict[int, list[int]] = {}
        self._free_tokens = 0  # bit f is set if a row has f free tokens

    def least_free(self, length: int) -> int | None:
        """Return the free tokens of the fullest row with room for ``length`` tokens; None if no row has room."""
        fitting = self._free_tokens >> length
        lowest_bit = fitting & -fitting
        return length + lowest_bit.bit_length() - 1 if fitting else None

    def add(self, row: int, free: int) -> None:
        """Add a row with ``free`` free tokens."""
        self._rows.setdefault(free, []).append(row)
        self._free_tokens |= 1 << free

    def pop(self, free: int) -> int:
        """Remove and return a row with exactly ``free`` free tokens."""
        row = self._rows[free].pop()
        if not self._rows[free]:
            self._free_tokens &= ~(1 << free)
        return row

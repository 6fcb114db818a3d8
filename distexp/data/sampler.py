"""Distribution of a data set over ranks: which samples each rank reads in each step.

The global batch of a step has the same samples for any number of ranks, so every strategy trains on the
same data. If the samples do not divide evenly, padding samples fill the last step. A padding sample is a
copy of a real one with all labels set to IGNORE. So every rank has the same number of batches with the
same shape, and no sample is dropped or counted twice.

A packed row counts as one sample here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from distexp.data.base import IGNORE, Sample, Samples, set_epoch

BUCKET_BATCHES = 50
"""Global batches whose samples are sorted by length together, with ``dataset.bucketing=true``."""


@dataclass(frozen=True)
class BatchSharding:
    """The division of a global batch into micro-batches of ranks.

    Attributes:
        accumulation: micro-batches of each rank in one optimizer step.
    """

    rank: int
    world_size: int
    micro_batch_size: int
    accumulation: int = 1

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self.world_size * self.micro_batch_size * self.accumulation


class ShardedBatchSampler:
    """Indices of this rank's micro-batches in one epoch.

    An index below ``length`` is a sample; ``length + i`` is a padding copy of sample ``i`` (see
    PaddedDataset). The order depends on the seed and the epoch, not on the number of ranks.

    Args:
        length: number of samples.
        sharding: division of the batches.
        seed: seed of the order.
        shuffle: whether to shuffle. If not, the order is that of the samples.
        lengths: tokens of each sample, to make batches of similar length; None: batches of any length.

    Attributes:
        epoch: epoch to iterate over; part of the seed.
        steps: optimizer steps of the epoch to iterate over; all of them by default.
    """

    def __init__(
        self,
        length: int,
        sharding: BatchSharding,
        *,
        seed: int,
        shuffle: bool,
        lengths: NDArray[np.int64] | None = None,
    ) -> None:
        self.length, self.sharding, self.seed, self.shuffle = length, sharding, seed, shuffle
        self.lengths = None if lengths is None else torch.from_numpy(lengths)
        self.epoch = 0
        self.steps = range(self.steps_per_epoch)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch; the last one may include padding samples."""
        return -(-self.length // self.sharding.global_batch)

    def __len__(self) -> int:
        return len(self.steps) * self.sharding.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        shape = (-1, self.sharding.world_size, self.sharding.micro_batch_size)
        micro_batches = self.global_batches(self.epoch).view(shape)
        first = self.steps.start * self.sharding.accumulation
        yield from micro_batches[first : first + len(self), self.sharding.rank].tolist()

    def global_batches(self, epoch: int) -> Tensor:
        """Return the indices of each step of an epoch, shape (steps, global batch)."""
        order, generator = torch.arange(self.length), torch.Generator().manual_seed(self.seed + epoch)
        if self.shuffle:
            order = torch.randperm(self.length, generator=generator)
        copied = order
        if self.lengths is not None:
            order = bucket_by_length(order, self.lengths, self.sharding.global_batch, generator)
            copied = order[(self.steps_per_epoch - 1) * self.sharding.global_batch :]
        missing = self.steps_per_epoch * self.sharding.global_batch - self.length
        padding = self.length + copied[torch.arange(missing) % len(copied)]
        return torch.cat([order, padding]).view(self.steps_per_epoch, self.sharding.global_batch)


def bucket_by_length(order: Tensor, lengths: Tensor, batch: int, generator: torch.Generator) -> Tensor:
    """Arrange samples so that each batch has samples of similar length.

    Samples are sorted in pieces of BUCKET_BATCHES batches. Then the batches are shuffled. The one with the longest
    sample is first, so that a run out of memory fails early. An incomplete batch is last.

    Args:
        order: shuffled indices of the samples.
        lengths: tokens of each sample.
        batch: samples of a global batch.
        generator: random state of the order of the batches.
    """
    pieces = torch.split(order, BUCKET_BATCHES * batch)
    by_length = torch.cat([piece[lengths[piece].argsort(stable=True)] for piece in pieces])
    complete = len(order) // batch
    batches = by_length[: complete * batch].view(complete, batch)
    batches = batches[torch.randperm(complete, generator=generator)]
    if complete:
        longest = int(lengths[batches].amax(dim=1).argmax())
        batches[[0, longest]] = batches[[longest, 0]]
    return torch.cat([batches.flatten(), by_length[complete * batch :]])


class PaddedDataset(Dataset[Sample]):
    """A data set followed by a padding copy of each sample.

    Index ``length + i`` is sample ``i`` without targets.

    The epoch is in shared memory, because persistent loader workers have copies of the samples.
    """

    def __init__(self, samples: Samples) -> None:
        self.samples = samples
        self._epoch: Tensor | None = None
        if hasattr(samples, "set_epoch"):
            self._epoch = torch.full((), -1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._known_epoch = -1

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the samples, here and in loader workers before their next sample."""
        if self._epoch is not None:
            self._epoch.fill_(epoch)
            self._known_epoch = epoch
            set_epoch(self.samples, epoch)

    def _follow_epoch(self) -> None:
        """Set the epoch of a worker's copy of the samples, if it has changed."""
        if self._epoch is not None and (epoch := int(self._epoch)) != self._known_epoch:
            self._known_epoch = epoch
            set_epoch(self.samples, epoch)

    def __len__(self) -> int:
        return 2 * len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        self._follow_epoch()
        if index < len(self.samples):
            return self.samples[index]
        sample = dict(self.samples[index - len(self.samples)])
        sample["labels"] = torch.full_like(sample["labels"], IGNORE)
        return sample

"""Which rank sees which sample, and when.

A step's global batch holds the same samples however many workers share it, so that every strategy
trains on the same data. What does not divide evenly is filled with samples whose labels are IGNORE:
every rank has the same number of equally shaped batches, and no sample is dropped or counted twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, device
from torch.utils.data import DataLoader, Dataset

from distexp.data.base import IGNORE, Batch, Sample, Samples, TaskData
from distexp.distributed import sum_over_ranks


@dataclass(frozen=True)
class Share:
    """One worker's part of every global batch."""

    rank: int
    world_size: int
    micro_batch_size: int
    accumulation: int = 1

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step over all workers."""
        return self.world_size * self.micro_batch_size * self.accumulation


class ShardedBatches:
    """The positions of this rank's micro-batches, epoch by epoch.

    A filling position is given as ``~position`` (negative). Shuffling depends on the seed and the
    epoch only, never on the number of ranks.
    """

    def __init__(self, length: int, share: Share, *, seed: int, shuffle: bool) -> None:
        self.length, self.share, self.seed, self.shuffle = length, share, seed, shuffle
        self.epoch = 0

    @property
    def steps(self) -> int:
        """Optimizer steps of an epoch; the last may hold fewer samples."""
        return -(-self.length // self.share.global_batch)

    def __len__(self) -> int:
        return self.steps * self.share.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self.length)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.length, generator=generator)
        missing = self.steps * self.share.global_batch - self.length
        filling = ~order[torch.arange(missing) % self.length]
        order = torch.cat([order, filling])
        micro, world = self.share.micro_batch_size, self.share.world_size
        yield from order.view(len(self), world, micro)[:, self.share.rank].tolist()


class Fillable(Dataset[Sample]):
    """Samples by position; ``~position`` gives the sample with nothing to learn from it."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        if index >= 0:
            return self.samples[index]
        sample = dict(self.samples[~index])
        sample["labels"] = torch.full_like(sample["labels"], IGNORE)
        return sample


@dataclass(frozen=True)
class Step:
    """This rank's micro-batches of one optimizer step."""

    micro_batches: list[Batch]
    normalizer: Tensor  # targets of the whole step, over all ranks, on the device
    samples: int  # of the whole step


class ShardedLoader:
    """Optimizer steps for one rank, on its device."""

    def __init__(
        self,
        samples: Samples,
        data: TaskData,
        share: Share,
        where: device,
        *,
        seed: int,
        shuffle: bool,
        num_workers: int,
    ) -> None:
        self.samples, self.share, self.device, self.task = samples, share, where, data.task
        self.batches = ShardedBatches(len(samples), share, seed=seed, shuffle=shuffle)
        self.loader = DataLoader(
            Fillable(samples),
            batch_sampler=self.batches,
            collate_fn=data.collate,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=where.type == "cuda",
        )

    @property
    def steps(self) -> int:
        """Optimizer steps of an epoch."""
        return self.batches.steps

    def epoch(self, epoch: int) -> Iterator[Step]:
        """The steps of an epoch; every rank must take all of them, for each holds a reduction."""
        self.batches.epoch = epoch
        set_epoch = getattr(self.samples, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        held: list[Batch] = []
        left = len(self.samples)
        for batch in self.loader:
            held.append(batch)
            if len(held) == self.share.accumulation:
                targets = torch.tensor(sum(b.targets for b in held), device=self.device)
                samples = min(left, self.share.global_batch)
                left -= samples
                yield Step([b.to(self.device) for b in held], sum_over_ranks(targets), samples)
                held = []

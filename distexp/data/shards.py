"""Which rank sees which sample, and when.

A step's global batch holds the same samples however many workers share it, so that every strategy
trains on the same data. What does not divide evenly is filled with samples whose labels are IGNORE:
every rank has the same number of equally shaped batches, and no sample is dropped or counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, device
from torch.utils.data import DataLoader, Dataset

from distexp.data.base import IGNORE, Batch, Sample, Samples, TaskData
from distexp.distributed.process_group import sum_over_ranks


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
        self.chosen = range(self.steps)  # the steps of the epoch that are wanted

    @property
    def steps(self) -> int:
        """Optimizer steps of an epoch; the last may hold fewer samples."""
        return -(-self.length // self.share.global_batch)

    def __len__(self) -> int:
        return len(self.chosen) * self.share.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self.length)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.length, generator=generator)
        missing = self.steps * self.share.global_batch - self.length
        filling = ~order[torch.arange(missing) % self.length]
        order = torch.cat([order, filling])
        micro, world = self.share.micro_batch_size, self.share.world_size
        rows = order.view(-1, world, micro)[:, self.share.rank]
        yield from rows[self.chosen.start * self.share.accumulation :][: len(self)].tolist()


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


class StopRequestedError(Exception):
    """All ranks have heard that the run has to end; the step before is done, and nothing after it begun."""


class Answers:
    """What a step's reduction says of stopping, read when the next step begins.

    By then a device has done that reduction, or soon will, so that nothing waits for the step itself; and
    all ranks read the same answer at the same step.
    """

    def __init__(self, where: device) -> None:
        self.host = torch.zeros(2, dtype=torch.int64, pin_memory=where.type == "cuda")
        self.copied = torch.cuda.Event() if where.type == "cuda" else None  # type: ignore[no-untyped-call]

    def keep(self, counts: Tensor) -> None:
        """Has the answer brought to the host, behind all that the device was given before."""
        self.host.copy_(counts, non_blocking=True)
        if self.copied is not None:
            self.copied.record()

    def check(self) -> None:
        """Raises StopRequestedError where some rank was asked to stop in the step before."""
        if self.copied is not None:
            self.copied.synchronize()
        if self.host[1]:
            raise StopRequestedError


class ShardedLoader:
    """Optimizer steps for one rank, on its device.

    Attributes:
        stopping: whether this rank was asked to stop; asked once a step.
    """

    stopping: Callable[[], bool]

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
        self.stopping = lambda: False
        self.begun: tuple[int, range, Iterator[Batch]] | None = None
        # The loader draws from it, and not from what the model's chance comes from.
        self.chance = torch.Generator()
        self.batches = ShardedBatches(len(samples), share, seed=seed, shuffle=shuffle)
        self.loader = DataLoader(
            Fillable(samples),
            batch_sampler=self.batches,
            collate_fn=data.collate,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=where.type == "cuda",
            generator=self.chance,
        )

    @property
    def steps(self) -> int:
        """Optimizer steps of an epoch."""
        return self.batches.steps

    def begin(self, epoch: int, steps: range) -> None:
        """Has the loader's workers read what ``epoch`` will be asked for first; nothing may be left of the last one."""
        self.batches.epoch, self.batches.chosen = epoch, steps
        self.chance.manual_seed(self.batches.seed + epoch)
        set_epoch = getattr(self.samples, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        self.begun = epoch, steps, iter(self.loader)

    def epoch(self, epoch: int, steps: range | None = None) -> Iterator[Step]:
        """The steps of an epoch, or some of them; every rank must take all of them, for each holds a reduction.

        Samples of other steps are not read. Raises StopRequestedError, on all ranks between the same steps.
        """
        chosen = range(self.steps) if steps is None else steps
        if self.begun is None or self.begun[:2] != (epoch, chosen):
            self.begin(epoch, chosen)
        assert self.begun is not None
        (_, _, batches), self.begun = self.begun, None
        held: list[Batch] = []
        left = len(self.samples) - chosen.start * self.share.global_batch
        answers = Answers(self.device)
        for batch in batches:
            held.append(batch)
            if len(held) == self.share.accumulation:
                answers.check()
                counts = torch.empty(2, dtype=torch.int64, device=self.device)
                counts[0].fill_(sum(b.targets for b in held))  # a tensor made of numbers would wait for the device
                counts[1].fill_(self.stopping())
                answers.keep(sum_over_ranks(counts))
                samples = min(left, self.share.global_batch)
                left -= samples
                yield Step([b.to(self.device) for b in held], counts[0], samples)
                held = []

"""Loader of a rank: the micro-batches of each optimizer step, and stop requests."""

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from distexp.config import ConfigError
from distexp.config.custom_code import check_returned, describe_type
from distexp.config.tasks import DECODER_LABELS, task_of
from distexp.data import base
from distexp.data.base import COLLATE, IGNORE, POSITIONS, Batch, Sample, Samples, TaskData
from distexp.data.text import PackedSamples
from distexp.distributed.process_group import sum_over_ranks
from distexp.system.files import PACKAGE
from distexp.system.torch_internals.collectives import DATA, annotate, annotate_items


@dataclass(frozen=True)
class BatchSharding:
    """The division of a global batch into micro-batches of ranks."""

    rank: int
    world_size: int
    micro_batch_size: int
    accumulation: int = 1  # micro-batches of each rank in one optimizer step
    copies: int = 1  # workers that have the same rank here, because they share its rows

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self.world_size * self.micro_batch_size * self.accumulation


@dataclass(frozen=True)
class StepData:
    """This rank's micro-batches of one optimizer step."""

    micro_batches: list[Batch]
    normalizer: Tensor  # number of targets of the step over all ranks; a scalar on the device
    num_samples: int  # samples of the step over all ranks
    wait_s: float = 0.0  # seconds that this rank waited for its data. The wait for the device is not part of it.
    workload: base.Workload = field(default_factory=base.Workload)  # sizes of this rank's micro-batches


class StopRequestedError(Exception):
    """A request to stop the run, raised on all ranks between the same two steps."""


class StopFlag:
    """A stop request, which the ranks exchange together with each step's number of targets.

    The sum over the ranks is copied to the host in the background and read before the next step. So no step waits for
    it, and all ranks read the same value at the same step.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.zeros((), dtype=torch.int64, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def record(self, requests: Tensor) -> None:
        """Start the copy of a scalar: the number of ranks that request a stop."""
        self._host.copy_(requests, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def check(self) -> None:
        """Raise StopRequestedError if a rank requested a stop in the previous step."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._host:
            raise StopRequestedError


@dataclass(frozen=True)
class ExplainedCollate:
    """Collate function that names the class of a data set with a wrong sample."""

    collate: Callable[[Sequence[Sample]], Batch]
    dataset: Samples

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """Collate samples. Raise ConfigError if a sample is not what a collate function of distexp needs."""
        try:
            return self.collate(samples)
        except (TypeError, KeyError, AttributeError) as error:
            # A custom collate function may need other samples.
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            is_ours = str(frame.f_globals.get("__name__")).startswith(f"{PACKAGE.name}.")
            if is_ours and (wrong := _wrong_sample(self.dataset, samples, error)):
                raise wrong from error
            raise


COLLATED = ("input_ids", "images", "labels", POSITIONS, DECODER_LABELS)
"""What the collate functions of distexp read of a sample."""


def _wrong_sample(dataset: Samples, samples: Sequence[Any], error: Exception) -> ConfigError | None:
    """Return what is wrong with one of the samples of a data set, due to which they could not be read."""
    wrong = next(filter(None, (_describe_wrong(sample, error) for sample in samples)), None)
    if wrong is None:
        return None
    return ConfigError(
        f"{type(dataset).__module__}.{type(dataset).__qualname__}.__getitem__ returned {wrong}: return a dict with a "
        "tensor for each input of the model, such as input_ids or images, and a tensor labels"
    )


def _describe_wrong(sample: Any, error: Exception) -> str | None:
    if not isinstance(sample, Mapping):
        return describe_type(sample)
    if isinstance(error, KeyError) and error.args and error.args[0] not in sample:
        return f"a sample without {error.args[0]} (it has {', '.join(map(str, sample)) or 'nothing'})"
    wrong = next((name for name in COLLATED if name in sample and not isinstance(sample[name], Tensor)), None)
    return wrong and f"a sample with {wrong} as {describe_type(sample[wrong])}"


class ShardedLoader:
    """Loader of optimizer steps for one rank, on its device; without ``num_workers`` it reads the samples itself."""

    stop_requested: Callable[[], bool]  # whether this rank has a request to stop; called once a step
    on_batch: Callable[[], None]  # called after each batch that was read, before anything that waits for other ranks

    def __init__(
        self,
        samples: Samples,
        data: TaskData,
        sharding: BatchSharding,
        device: torch.device,
        *,
        seed: int,
        shuffle: bool,
        num_workers: int,
        lengths: NDArray[np.int64] | None = None,
    ) -> None:
        self.samples, self.sharding, self.device, self.task = samples, sharding, device, data.task
        self.stop_requested = lambda: False
        self.on_batch = lambda: None
        # Epoch, steps and batches that the loader's workers are reading already.
        self._prefetched: tuple[int, range, Iterator[Batch]] | None = None
        # One flag for all epochs: the first step of an epoch reads what the last one of the previous epoch recorded.
        self._stop = StopFlag(device)
        # DataLoader draws the seeds of its workers from this generator, so the global RNG state is untouched.
        self._generator = torch.Generator()
        self.sampler = ShardedBatchSampler(len(samples), sharding, seed=seed, shuffle=shuffle, lengths=lengths)
        self._padded = PaddedDataset(samples)
        self._loader = DataLoader(
            self._padded,
            batch_sampler=self.sampler,
            collate_fn=ExplainedCollate(data.collate, samples),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=device.type == "cuda",
            generator=self._generator,
        )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return self.sampler.steps_per_epoch

    @property
    def has_accuracy(self) -> bool:
        """Return whether the task has an accuracy."""
        return task_of(self.task).has_classes

    def prefetch(self, epoch: int, steps: range) -> None:
        """Start loading the first batches of ``steps`` in the loader's workers, after the end of the previous epoch."""
        self.sampler.epoch, self.sampler.steps = epoch, steps
        self._generator.manual_seed(self.sampler.seed + epoch)
        self._padded.set_epoch(epoch)
        self._prefetched = (epoch, steps, iter(self._loader))

    def iter_steps(self, epoch: int, steps: range | None = None) -> Iterator[StepData]:
        """Yield the steps of an epoch, or a range of them.

        Samples of other steps are not read. Each step is a collective, so every rank must consume all steps. Raise
        StopRequestedError if a rank requested a stop; raised on all ranks between the same steps. Raise RuntimeError if
        the data end before the last step.
        """
        started = time.perf_counter()
        wanted = range(self.steps_per_epoch) if steps is None else steps
        if self._prefetched is None or self._prefetched[:2] != (epoch, wanted):
            self.prefetch(epoch, wanted)
        assert self._prefetched is not None
        (_, _, batches), self._prefetched = self._prefetched, None
        num_samples = iter(self._count_samples(epoch, wanted))
        micro_batches: list[Batch] = []
        for batch in annotate_items(DATA, batches):
            self.on_batch()
            check_returned(batch, Batch, COLLATE)
            micro_batches.append(batch)
            if len(micro_batches) == self.sharding.accumulation:
                with annotate(DATA):
                    placed = [base.to_device(self.samples, batch, self.device) for batch in micro_batches]
                wait_s = time.perf_counter() - started
                self._stop.check()  # waits until the device has finished the step before the previous one
                normalizer, requests = self._sum_counts(micro_batches)
                self._stop.record(requests)
                workload = base.measure_workload(micro_batches)
                yield StepData(placed, normalizer, next(num_samples), wait_s, workload)
                micro_batches, started = [], time.perf_counter()
        if missing := sum(1 for _ in num_samples):  # The loop takes a StopIteration of a data set as its end.
            raise RuntimeError(
                f"the data set ended {missing} of {len(wanted)} steps too early: its __getitem__ or its collate "
                "function has raised StopIteration"
            )

    def _count_samples(self, epoch: int, steps: range) -> list[int]:
        """Return the samples of each step over all ranks, without padding samples. A packed row has several."""
        counts = torch.ones(len(self.samples), dtype=torch.int64)
        if isinstance(self.samples, PackedSamples):
            counts = torch.from_numpy(self.samples.counts)
        with_padding = torch.cat([counts, torch.zeros_like(counts)])
        return with_padding[self.sampler.global_batches(epoch)[steps.start : steps.stop]].sum(dim=1).tolist()

    def _sum_counts(self, micro_batches: list[Batch]) -> Tensor:
        """Sum the targets of a step and the stop requests over the ranks; shape (2,)."""
        counts = torch.empty(2, dtype=torch.int64, device=self.device)
        # torch.tensor([...], device="cuda") would block until the GPU is idle; fill_ does not.
        counts[0].fill_(sum(batch.num_targets for batch in micro_batches))
        counts[1].fill_(self.stop_requested())
        sum_over_ranks(counts)
        if self.sharding.copies > 1:
            counts[:1] //= self.sharding.copies  # Workers with the same rows have counted the same targets.
        return counts


BUCKET_BATCHES = 50
"""Global batches whose samples are sorted by length together, with ``dataset.bucketing=true``."""


class ShardedBatchSampler:
    """Indices of this rank's micro-batches in one epoch, of its steps ``steps``.

    The order depends on the seed and the epoch. The global batch of a step has the same samples for any number of
    ranks, so every strategy trains on the same data. If the samples do not divide evenly, padding samples fill the last
    step. So every rank has the same number of batches with the same shape, and no sample is dropped or counted twice.

    An index below ``length`` is a sample, or a packed row; ``length + i`` is a padding copy of sample ``i`` (see
    PaddedDataset). With ``lengths``, the tokens of each sample, batches have samples of similar length.
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
            # Samples are sorted in pieces of BUCKET_BATCHES batches. Then the batches are shuffled. The one with the
            # longest sample is first, so that a run out of memory fails early. An incomplete batch is last.
            batch = self.sharding.global_batch
            pieces = torch.split(order, BUCKET_BATCHES * batch)
            by_length = torch.cat([piece[self.lengths[piece].argsort(stable=True)] for piece in pieces])
            complete = len(order) // batch
            batches = by_length[: complete * batch].view(complete, batch)
            batches = batches[torch.randperm(complete, generator=generator)]
            if complete:
                longest = int(self.lengths[batches].amax(dim=1).argmax())
                batches[[0, longest]] = batches[[longest, 0]]
            order = torch.cat([batches.flatten(), by_length[complete * batch :]])
            copied = order[(self.steps_per_epoch - 1) * self.sharding.global_batch :]
        missing = self.steps_per_epoch * self.sharding.global_batch - self.length
        padding = self.length + copied[torch.arange(missing) % len(copied)]
        return torch.cat([order, padding]).view(self.steps_per_epoch, self.sharding.global_batch)


class PaddedDataset(Dataset[Sample]):
    """A data set followed by a padding copy of each sample: index ``length + i`` is sample ``i`` without targets.

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
            base.set_epoch(self.samples, epoch)

    def __len__(self) -> int:
        return 2 * len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        if self._epoch is not None and (epoch := int(self._epoch)) != self._known_epoch:
            self._known_epoch = epoch
            base.set_epoch(self.samples, epoch)
        if index < len(self.samples):
            return self.samples[index]
        sample = self.samples[index - len(self.samples)]
        try:
            return {**sample, "labels": torch.full_like(sample["labels"], IGNORE)}
        except (TypeError, KeyError) as error:
            if wrong := _wrong_sample(self.samples, [sample], error):
                raise wrong from error
            raise

"""Sharding: each sample is used once, for any number of ranks."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from distexp.config import ConfigError, TrainConfig
from distexp.data import loader
from distexp.data.base import IGNORE, Batch, Sample, TaskData
from distexp.data.images import collate_images
from distexp.data.loader import BatchSharding, PaddedDataset, ShardedBatchSampler, ShardedLoader, StopRequestedError
from distexp.data.text import TextCollate, pack_training_set
from distexp.distributed.context import Context
from distexp.training.build import make_loaders
from distexp.training.inputs import StepPlan, TrainingInputs
from distexp.training.loop import end_epoch
from tests.helpers.runs import resolve_cell


def global_batches(length: int, world: int, micro: int, accumulation: int, epoch: int = 0) -> list[list[int]]:
    """Return the indices of each global batch; padding copies start at ``length``."""
    ranks = []
    for rank in range(world):
        batches = ShardedBatchSampler(length, BatchSharding(rank, world, micro, accumulation), seed=7, shuffle=True)
        batches.epoch = epoch
        rows = list(batches)
        assert len(rows) == len(batches)
        assert all(len(row) == micro for row in rows)
        ranks.append(rows)
    return [
        [index for rows in ranks for row in rows[at : at + accumulation] for index in row]
        for at in range(0, len(ranks[0]), accumulation)
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("length", [1, 5, 24, 100])
def test_every_sample_counts_once(world: int, length: int) -> None:
    seen = Counter(index for step in global_batches(length, world, 2, 2) for index in step if index < length)
    assert seen == Counter(range(length))


@pytest.mark.parametrize("shape", [(2, 4, 3), (3, 4, 2), (4, 3, 2), (6, 4, 1), (24, 1, 1)])
def test_a_global_batch_is_the_same_for_any_number_of_ranks(shape: tuple[int, int, int]) -> None:
    def counted(world: int, micro: int, accumulation: int) -> list[set[int]]:
        return [{i for i in step if i < 113} for step in global_batches(113, world, micro, accumulation)]

    assert counted(*shape) == counted(1, 4, 6)


def test_each_epoch_has_its_own_repeatable_order() -> None:
    assert global_batches(50, 2, 2, 2, epoch=0) != global_batches(50, 2, 2, 2, epoch=1)
    assert global_batches(50, 2, 2, 2, epoch=1) == global_batches(50, 2, 2, 2, epoch=1)


class CountingSamples:
    """Twelve samples with their index as label, and a count of reads in all processes."""

    def __init__(self) -> None:
        self.reads = torch.zeros(12, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self.reads)

    def __getitem__(self, index: int) -> Sample:
        self.reads[index] += 1
        return {"images": torch.zeros(3, 2, 2, dtype=torch.uint8), "labels": torch.tensor(index)}

    def wait_for_reads(self, seconds: float = 300.0) -> bool:
        """Return whether a sample is read within some seconds."""
        deadline = time.monotonic() + seconds
        while not self.reads.any() and time.monotonic() < deadline:
            time.sleep(0.01)
        return bool(self.reads.any())


def make_loader(samples: CountingSamples, num_workers: int) -> ShardedLoader:
    data = TaskData("image_classification", samples, samples, collate_images, num_classes=len(samples))
    sharding = BatchSharding(rank=0, world_size=1, micro_batch_size=2)
    return ShardedLoader(samples, data, sharding, torch.device("cpu"), seed=1, shuffle=True, num_workers=num_workers)


def read_labels(loader: ShardedLoader, epoch: int, steps: range | None = None) -> list[list[int]]:
    return [batch.labels.tolist() for step in loader.iter_steps(epoch, steps) for batch in step.micro_batches]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_prefetched_epoch_has_its_own_samples(num_workers: int) -> None:
    plain = make_loader(CountingSamples(), 0)
    samples = CountingSamples()
    loader = make_loader(samples, num_workers)
    read_labels(loader, 0)
    samples.reads.zero_()
    loader.prefetch(1, range(loader.steps_per_epoch))
    assert samples.wait_for_reads() if num_workers else not samples.reads.any()
    assert read_labels(loader, 1) == read_labels(plain, 1)
    assert samples.reads.tolist() == [1] * 12
    loader.prefetch(2, range(loader.steps_per_epoch))
    assert read_labels(loader, 3, range(2, 4)) == read_labels(plain, 3)[2:4], "not the prefetched epoch"


class EndingSamples(CountingSamples):
    """Samples of which one raises the error that ends a loop."""

    def __getitem__(self, index: int) -> Sample:
        if index == 5:
            raise StopIteration
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_data_that_end_too_early_are_an_error(num_workers: int) -> None:
    with pytest.raises(RuntimeError, match="steps too early: its __getitem__ or its collate function"):
        read_labels(make_loader(EndingSamples(), num_workers), 0)


TOKENS = torch.arange(3)
NEEDED = "return a dict with a tensor for each input of the model, such as input_ids or images, and a tensor labels"


@pytest.mark.parametrize(
    ("collate", "sample", "returned"),
    [
        (TextCollate(0, length=None), None, "None"),
        (TextCollate(0, length=None), (TOKENS, TOKENS), "a tuple"),
        (TextCollate(0, length=None), {"input_ids": TOKENS}, "a sample without labels (it has input_ids)"),
        (TextCollate(0, length=None), {"input_ids": TOKENS, "labels": [1, 2, 3]}, "a sample with labels as a list"),
        (collate_images, None, "None"),
        (collate_images, {"labels": TOKENS[0]}, "a sample without images (it has labels)"),
        (lambda samples: samples[0]["row"], {"labels": TOKENS}, None),
    ],
)
def test_the_class_of_a_data_set_with_a_wrong_sample_is_named(collate: Any, sample: Any, returned: str | None) -> None:
    data = TaskData("causal_lm", [sample], [sample], collate, num_classes=1)
    kwargs: dict[str, Any] = {"seed": 0, "shuffle": False, "num_workers": 0}
    loader = ShardedLoader(data.train, data, BatchSharding(0, 1, 2), torch.device("cpu"), **kwargs)
    with pytest.raises((ConfigError, KeyError)) as caught:  # The second sample of the batch is a padding copy.
        list(loader.iter_steps(0))
    if returned is None:
        assert isinstance(caught.value, KeyError), "the collate function of the user may need other samples"
    else:
        assert str(caught.value) == f"builtins.list.__getitem__ returned {returned}: {NEEDED}"


def test_the_next_epoch_is_prefetched_during_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, seen = CountingSamples(), []
    training, evaluation = make_loader(samples, 1), make_loader(CountingSamples(), 0)
    read_labels(training, 0)
    plan = StepPlan(TrainConfig(num_epochs=2), steps_per_epoch=training.steps_per_epoch)

    class WaitingModel:
        module: Any = torch.nn.Identity()

        def forward(self, batch: Batch) -> Tensor:
            seen.append(samples.wait_for_reads() if prefetches else bool(samples.reads.any()))
            return torch.zeros(len(batch.labels), 12)

    for prefetches, steps in ((True, 6), (False, 12)):
        samples.reads.zero_()
        seen.clear()
        prefetch = MagicMock(wraps=training.prefetch)
        monkeypatch.setattr(training, "prefetch", prefetch)
        inputs = TrainingInputs(training, evaluation, plan, MagicMock(steps=steps), run_id="")
        end_epoch(WaitingModel(), inputs)  # type: ignore[arg-type]
        assert (seen, prefetch.called) == ([prefetches] * 6, prefetches), "nothing is prefetched after the last epoch"
        read_labels(training, 1)


@pytest.mark.parametrize("steps_per_epoch", [1, 2, 3])
def test_a_stop_request_is_read_before_the_next_step(steps_per_epoch: int) -> None:
    loader, done = make_loader(CountingSamples(), 0), list[Batch]()
    loader.stop_requested = lambda: len(done) == 2

    def train() -> None:
        for epoch in range(6):
            for step in loader.iter_steps(epoch, range(steps_per_epoch)):
                done.extend(step.micro_batches)

    with pytest.raises(StopRequestedError):
        train()
    assert len(done) == 3, "the third step exchanges the request of a rank"


def test_a_padding_sample_has_the_inputs_of_its_sample_and_no_labels() -> None:
    samples = [{"input_ids": torch.tensor([n, n + 1]), "labels": torch.tensor([n, 1])} for n in range(3)]
    padded = PaddedDataset(samples)
    for index, sample in enumerate(samples):
        copy = padded[len(samples) + index]
        assert torch.equal(copy["input_ids"], sample["input_ids"])
        assert (copy["labels"] == IGNORE).all()
        assert torch.equal(padded[index]["labels"], sample["labels"]), "the sample itself keeps its labels"


def test_the_wait_is_that_for_the_data_and_not_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    class SlowSamples(CountingSamples):
        def __getitem__(self, index: int) -> Sample:
            clock[0] += 1
            return super().__getitem__(index)

    def wait_for_device(self: loader.StopFlag) -> None:
        clock[0] += 100

    monkeypatch.setattr(loader, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(loader.StopFlag, "check", wait_for_device)
    waits = []
    for step in make_loader(SlowSamples(), 0).iter_steps(0):
        waits.append(step.wait_s)
        clock[0] += 1000  # the step
    assert waits == [2.0] * 6


class EpochSamples:
    """Samples that contain the epoch they were read in."""

    epoch = 7

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Sample:
        return {"input_ids": torch.full((4,), self.epoch), "labels": torch.full((4,), index)}

    def set_epoch(self, epoch: int) -> None:
        """Store the epoch."""
        self.epoch = epoch


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("packed", [False, True])
def test_samples_are_read_in_their_epoch(num_workers: int, packed: bool) -> None:
    """Also if a loader worker has a copy of them, if they are in packed rows, and after an evaluation."""
    data = TaskData("causal_lm", EpochSamples(), EpochSamples(), TextCollate(0, 8), 10)
    if packed:
        data = pack_training_set(data, 8, 0)
    train, evaluation = (
        ShardedLoader(
            samples, data, BatchSharding(0, 1, 4), torch.device("cpu"), seed=0, shuffle=False, num_workers=num_workers
        )
        for samples in (data.train, data.evaluation)
    )
    for epoch in range(3):
        for step in train.iter_steps(epoch):
            assert (step.micro_batches[0].inputs["input_ids"][:, :4] == epoch).all()
        train.prefetch(epoch + 1, range(train.steps_per_epoch))
        for step in evaluation.iter_steps(0):
            assert (step.micro_batches[0].inputs["input_ids"][:, :4] == 0).all()


def test_one_object_can_be_the_training_and_the_evaluation_set(tmp_path: Path) -> None:
    samples = EpochSamples()
    data = TaskData("causal_lm", samples, samples, TextCollate(0, 8), 10)
    config = resolve_cell("strategy=single", "train.micro_batch_size=4", "train.gradient_accumulation_steps=1")
    train, evaluation = make_loaders(config, data, Context(0, 1, 0, 1, 1, torch.device("cpu"), tmp_path))
    train.prefetch(5, range(2))
    next(evaluation.iter_steps(0))
    (step, *_) = train.iter_steps(5, range(2))
    assert (step.micro_batches[0].inputs["input_ids"][:, :4] == 5).all()
    assert [evaluation.sampler.shuffle, train.sampler.shuffle] == [False, True]

"""Packed rows and batches of similar length: every sample counts once, for any number of workers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from distexp.config import ConfigError
from distexp.data.base import IGNORE, Sample, TaskData
from distexp.data.loader import BatchSharding, PaddedDataset, ShardedBatchSampler, ShardedLoader
from distexp.data.text import (
    PackedSamples,
    RightPadding,
    TextCollate,
    assign_rows,
    pack_training_set,
    pad_to_batch,
    sample_lengths,
)
from tests.helpers.runs import resolve_cell

LENGTHS = np.random.default_rng(5).integers(2, 40, 137)


def text_samples() -> list[Sample]:
    """Return samples whose tokens are their index, and whose first half has no targets."""
    samples = []
    for index, length in enumerate(LENGTHS.tolist()):
        tokens = torch.full((length,), index + 1)
        labels = tokens.clone()
        labels[: length // 2] = IGNORE
        samples.append({"input_ids": tokens, "labels": labels})
    return samples


def text_data(samples: list[Sample] | None = None) -> TaskData:
    held = text_samples() if samples is None else samples
    return TaskData("causal_lm", held, held, TextCollate(0, 40), num_classes=200)


def make_loader(data: TaskData, rank: int, shape: tuple[int, int, int], lengths: Any = None) -> ShardedLoader:
    world, micro, accumulation = shape
    sharding = BatchSharding(rank, world, micro, accumulation)
    cpu = torch.device("cpu")
    return ShardedLoader(data.train, data, sharding, cpu, seed=7, shuffle=True, num_workers=0, lengths=lengths)


@pytest.mark.parametrize("capacity", [39, 40, 64, 512])
def test_rows_hold_each_sample_once_and_have_little_padding(capacity: int) -> None:
    rows = assign_rows(LENGTHS, capacity, seed=1)
    assert sorted(itertools.chain(*rows)) == list(range(len(LENGTHS)))
    filled = [int(LENGTHS[row].sum()) for row in rows]
    assert max(filled) <= capacity
    fewest = -(-int(LENGTHS.sum()) // capacity)
    assert len(rows) <= fewest + 1
    assert rows == assign_rows(LENGTHS, capacity, seed=1)
    assert rows != assign_rows(LENGTHS, capacity, seed=2)


def test_samples_as_long_as_a_row_have_their_own() -> None:
    assert sorted(assign_rows(np.array([8, 8, 8]), 8, seed=0)) == [[0], [1], [2]]


def test_a_row_has_the_positions_and_targets_of_its_samples() -> None:
    samples = [{"input_ids": torch.tensor([n, n + 1, n + 2]), "labels": torch.tensor([n, IGNORE, 5])} for n in (3, 7)]
    row = PackedSamples(samples, [[1, 0]])[0]
    assert row["input_ids"].tolist() == [7, 8, 9, 3, 4, 5]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 2]
    assert row["labels"].tolist() == [IGNORE, IGNORE, 5, IGNORE, IGNORE, 5]
    assert samples[0]["labels"].tolist() == [3, IGNORE, 5], "the samples themselves keep their labels"


def test_a_batch_of_rows_counts_samples_targets_and_tokens() -> None:
    samples = text_samples()
    packed = PackedSamples(samples, assign_rows(LENGTHS, 40, seed=1))
    collate = TextCollate(0, 40)
    batch, plain = collate([packed[row] for row in range(len(packed))]), collate(samples)
    assert batch.inputs.keys() == {"input_ids", "position_ids"}
    assert batch.inputs["position_ids"].shape == batch.labels.shape == (len(packed), 40)
    assert batch.num_samples == plain.num_samples == len(samples)
    assert (batch.num_targets, batch.num_tokens) == (plain.num_targets, plain.num_tokens)
    padding = collate([PaddedDataset(packed)[len(packed)]])
    assert (padding.num_samples, padding.num_targets, padding.num_tokens) == (0, 0, 0)


@pytest.mark.parametrize("shape", [(1, 4, 3), (2, 2, 3), (3, 4, 1)])
def test_packed_steps_are_the_same_for_any_number_of_workers(shape: tuple[int, int, int]) -> None:
    data = pack_training_set(text_data(), 40, seed=3)
    reference = list(make_loader(data, 0, (1, 12, 1)).iter_steps(1))
    ranks = [list(make_loader(data, rank, shape).iter_steps(1)) for rank in range(shape[0])]
    assert sum(step.num_samples for step in reference) == len(LENGTHS)
    for expected, *steps in zip(reference, *ranks, strict=True):
        batches = [batch for step in steps for batch in step.micro_batches]
        assert {step.num_samples for step in steps} == {expected.num_samples}
        assert sum(batch.num_samples for batch in batches) == expected.num_samples
        assert sum(int(step.normalizer) for step in steps) == int(expected.normalizer)
        tokens = [batch.inputs["input_ids"][(batch.labels != IGNORE).any(dim=1)].tolist() for batch in batches]
        theirs = expected.micro_batches[0]
        kept = theirs.inputs["input_ids"][(theirs.labels != IGNORE).any(dim=1)].tolist()
        assert sorted(itertools.chain(*tokens)) == sorted(kept)


def test_a_resumed_packed_epoch_counts_the_samples_of_its_steps() -> None:
    loader = make_loader(pack_training_set(text_data(), 40, seed=3), 0, (1, 4, 1))
    counts = [step.num_samples for step in loader.iter_steps(0)]
    assert [step.num_samples for step in loader.iter_steps(0, range(2, 5))] == counts[2:5]
    assert len(set(counts)) > 1


def global_batches(world: int, micro: int, accumulation: int, epoch: int = 0) -> list[list[int]]:
    """Return the indices of each bucketed global batch."""
    sharding = BatchSharding(0, world, micro, accumulation)
    sampler = ShardedBatchSampler(len(LENGTHS), sharding, seed=7, shuffle=True, lengths=LENGTHS)
    return sampler.global_batches(epoch).tolist()


def test_batches_have_samples_of_similar_length() -> None:
    batches = global_batches(1, 4, 1)
    lengths = [LENGTHS[np.array(batch) % len(LENGTHS)] for batch in batches]
    assert np.mean([np.ptp(length) for length in lengths]) < 3 < np.ptp(LENGTHS)
    assert max(map(max, lengths)) == max(lengths[0]), "the longest is first"
    real = [index for batch in batches for index in batch if index < len(LENGTHS)]
    assert sorted(real) == list(range(len(LENGTHS)))
    assert batches == global_batches(1, 4, 1)
    assert batches != global_batches(1, 4, 1, epoch=1)


@pytest.mark.parametrize("shape", [(2, 2, 3), (3, 4, 1), (12, 1, 1)])
def test_bucketed_batches_are_the_same_for_any_number_of_workers(shape: tuple[int, int, int]) -> None:
    assert global_batches(*shape) == global_batches(1, 4, 3)


def test_fewer_samples_than_a_batch_can_be_bucketed() -> None:
    sampler = ShardedBatchSampler(3, BatchSharding(0, 1, 8), seed=1, shuffle=True, lengths=LENGTHS[:3])
    (batch,) = sampler.global_batches(0).tolist()
    assert {index % 3 for index in batch} == {0, 1, 2}
    assert sum(index < 3 for index in batch) == 3


def test_bucketed_batches_are_padded_to_their_longest_sample() -> None:
    plain, data = text_data(), pad_to_batch(text_data(), limit=40)
    loader = make_loader(data, 0, (1, 4, 1), lengths=sample_lengths(data.train))
    batches = [step.micro_batches[0] for step in loader.iter_steps(0)]
    assert {batch.labels.shape[1] for batch in batches} == {32, 40}, "a multiple of 32, or the limit"
    padded = [step.micro_batches[0] for step in make_loader(plain, 0, (1, 4, 1)).iter_steps(0)]
    for name in ("num_samples", "num_targets", "num_tokens"):
        assert sum(getattr(batch, name) for batch in batches) == sum(getattr(batch, name) for batch in padded)
    assert sum(batch.num_positions for batch in batches) < sum(batch.num_positions for batch in padded)


def test_padding_on_the_left_is_refused_for_fast_attention() -> None:
    batch = TextCollate(0, 4)([{"input_ids": torch.ones(2).long(), "labels": torch.ones(2).long()}])
    assert RightPadding(lambda samples: batch)([]) is batch
    left = {name: tensor.flip(1) for name, tensor in batch.inputs.items()}
    with pytest.raises(ConfigError, match=r"pads on the left, .* change its collate, or use model.attention=auto"):
        RightPadding(lambda samples: replace(batch, inputs=left))([])


def test_a_sample_longer_than_a_row_is_refused() -> None:
    data = text_data()
    longest = int(sample_lengths(data.train).max())
    with pytest.raises(ConfigError, match=rf"rows of {longest - 1} tokens, but a training sample has {longest}: raise"):
        pack_training_set(data, longest - 1, seed=0)


def test_custom_data_needs_the_collate_function_of_text() -> None:
    data = replace(text_data(), collate=TextCollate(0, 40).__call__)
    with pytest.raises(ConfigError, match=r"dataset.packing=true needs data whose collate is a distexp.data.text.Text"):
        pack_training_set(data, 40, seed=0)
    with pytest.raises(ConfigError, match=r"dataset.bucketing=true needs data whose collate is a distexp.data.text.Te"):
        pad_to_batch(data, 40)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("dataset.packing=true",), "model=bloom_tiny with model.attention=auto: use model.attention=sdpa, or flex on"),
        (
            ("model=gpt_tiny", "dataset.packing=true", "dataset.bucketing=true"),
            "no effect on packed rows: set dataset.p",
        ),
        (
            ("model=resnet_tiny", "dataset=synthetic", "dataset.packing=true"),
            "dataset.packing=true is for causal_lm, but model=resnet_tiny is for image_classification: leave it out",
        ),
        (
            ("model.task=seq2seq_lm", "dataset=chat", "dataset.path=any", "dataset.targets=all"),
            "dataset.targets=all is for causal_lm, but model=bloom_tiny is for seq2seq_lm: leave it out",
        ),
        (
            ("model.task=seq2seq_lm", "dataset=chat", "dataset.path=any", "dataset.chat_template=zephyr"),
            "dataset.chat_template=zephyr is for causal_lm, but model=bloom_tiny is for seq2seq_lm: leave it out",
        ),
        (
            ("model=resnet_tiny", "dataset=tinyimagenet_sample", "dataset.bucketing=true"),
            "dataset.bucketing=True is not a key of dataset=tinyimagenet_sample",
        ),
    ],
)
def test_impossible_settings_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_cell("cluster.device=cpu", *overrides)

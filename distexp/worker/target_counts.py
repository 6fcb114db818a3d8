"""The numbers of tokens and targets in the micro-batches of a run, known from the lengths before a sample is read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distexp.config import Config
from distexp.data.base import Samples, TaskData
from distexp.data.packing import PackedSamples
from distexp.data.sampler import BatchSharding, ShardedBatchSampler
from distexp.data.text import TokenSamples
from distexp.training.schedule import StepPlan

MAX_EPOCHS = 10
"""Epochs whose batches are compared. More would take time and find hardly larger ones."""


def training_micro_batches(config: Config, samples: Samples, *, epochs: int) -> Tensor:
    """Return the indices of the micro-batches of all ranks, shape (micro-batches, samples).

    As in ``ShardedBatchSampler``, an index from the number of samples on is a padding sample, without targets.
    """
    train = config.train
    sharding = BatchSharding(0, config.cluster.world_size, train.micro_batch, train.gradient_accumulation_steps)
    lengths = lengths_of(samples) if config.dataset.bucketing else None
    sampler = ShardedBatchSampler(len(samples), sharding, seed=train.seed, shuffle=True, lengths=lengths)
    plan = StepPlan(train, sampler.steps_per_epoch)
    used = [sampler.global_batches(epoch)[: len(plan.steps_of(epoch, 0))] for epoch in list(plan.epochs(0))[:epochs]]
    return torch.cat(used).view(-1, train.micro_batch)


def max_targets(config: Config, data: TaskData) -> dict[int, int]:
    """Return the largest number of targets of a micro-batch, by its number of samples.

    The micro-batches are those of the training, and those of the evaluation if the run evaluates.

    Returns:
        Without a kind whose targets are not known before the samples are read.
    """
    found: dict[int, int] = {}
    for rows, targets in _micro_batch_targets(config, data):
        summed = torch.from_numpy(np.concatenate([targets, np.zeros_like(targets)]))[rows].sum(dim=1)
        found[rows.shape[1]] = max(found.get(rows.shape[1], 0), int(summed.max()))
    return found


def _micro_batch_targets(config: Config, data: TaskData) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
    """Yield the micro-batches of training and evaluation, with the targets of each sample."""
    train = config.train
    _, targets = token_counts(data.train)
    if targets is not None and _has_prompts(data.train):
        yield training_micro_batches(config, data.train, epochs=MAX_EPOCHS), targets
    _, targets = token_counts(data.evaluation)
    if train.evaluate and targets is not None and _has_prompts(data.evaluation):
        size = train.eval_batch_size or train.micro_batch
        sharding = BatchSharding(0, config.cluster.world_size, size)
        sampler = ShardedBatchSampler(len(data.evaluation), sharding, seed=train.seed, shuffle=False)
        yield sampler.global_batches(0).view(-1, size), targets


def _has_prompts(samples: Samples) -> bool:
    """Return whether the targets of samples are known. Those of other samples may be fewer than their tokens."""
    return isinstance(samples.samples if isinstance(samples, PackedSamples) else samples, TokenSamples)


def lengths_of(samples: Samples) -> NDArray[np.int64] | None:
    """Return the tokens of each sample; None if they are not known without reading the samples."""
    lengths = getattr(samples, "lengths", None)
    return None if lengths is None else np.asarray(lengths, dtype=np.int64)


def token_counts(samples: Samples) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """Return tokens and targets of each sample; None if they are not known without reading the samples.

    The first token of a sample is never a target. Without prompts, all other tokens may be targets.
    """
    if isinstance(samples, PackedSamples):
        lengths, targets = token_counts(samples.samples)
        if lengths is None or targets is None:
            return None, None
        rows = [list(row) for row in samples.rows]
        return _sums(lengths, rows), _sums(targets, rows)
    lengths = lengths_of(samples)
    if lengths is None:
        return None, None
    prompts = samples.prompt_lengths if isinstance(samples, TokenSamples) else np.ones_like(lengths)
    return lengths, lengths - np.maximum(prompts, 1)


def _sums(values: NDArray[np.int64], rows: list[list[int]]) -> NDArray[np.int64]:
    return np.array([int(values[row].sum()) for row in rows], dtype=np.int64)

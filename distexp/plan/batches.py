"""The micro-batch of a run that needs the most memory."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distexp.config import Config
from distexp.data.base import Batch, Samples, TaskData
from distexp.data.packing import PackedSamples
from distexp.data.sampler import BatchSharding, PaddedDataset, ShardedBatchSampler
from distexp.data.text import TokenSamples
from distexp.training.schedule import StepPlan

MAX_EPOCHS = 10
"""Epochs whose batches are compared. More would take time and find hardly larger ones."""

READ_BATCHES = 8
"""Micro-batches that are read and compared if the lengths of the samples are not known."""


def largest_batch(config: Config, data: TaskData) -> Batch:
    """Return the micro-batch of any rank with the most positions, and of those the one with the most targets."""
    samples = PaddedDataset(data.train)
    size = config.train.micro_batch
    if config.model.task != "causal_lm":
        return data.collate([data.train[0]] * size)
    lengths, targets = _token_counts(data.train)
    if lengths is None or targets is None:
        first = _micro_batches(config, data.train, epochs=1)[:READ_BATCHES]
        batches = [data.collate([samples[index] for index in row]) for row in first.tolist()]
        return max(batches, key=lambda batch: (batch.num_positions, batch.num_targets))
    rows = _micro_batches(config, data.train, epochs=MAX_EPOCHS)
    longest = torch.from_numpy(np.concatenate([lengths, lengths]))[rows].amax(dim=1)
    summed = torch.from_numpy(np.concatenate([targets, np.zeros_like(targets)]))[rows].sum(dim=1)
    worst = int((longest * (int(summed.max()) + 1) + summed).argmax())
    if getattr(data.collate, "length", 1) is not None and config.dataset.padding == "max_length":
        worst = int(summed.argmax())
    return data.collate([samples[index] for index in rows[worst].tolist()])


def evaluation_batch(config: Config, data: TaskData) -> Batch:
    """Return a batch of the evaluation with its longest samples; the first ones if the lengths are not known."""
    size = min(config.train.eval_batch_size or config.train.micro_batch, len(data.evaluation))
    lengths = _lengths(data.evaluation)
    order = range(len(data.evaluation)) if lengths is None else np.argsort(-lengths, kind="stable").tolist()
    return data.collate([data.evaluation[index] for index in order[:size]])


def _micro_batches(config: Config, samples: Samples, *, epochs: int) -> Tensor:
    """Return the indices of the micro-batches of all ranks, shape (micro-batches, samples)."""
    train = config.train
    sharding = BatchSharding(0, config.cluster.world_size, train.micro_batch, train.gradient_accumulation_steps)
    lengths = _lengths(samples) if config.dataset.bucketing else None
    sampler = ShardedBatchSampler(len(samples), sharding, seed=train.seed, shuffle=True, lengths=lengths)
    plan = StepPlan(train, sampler.steps_per_epoch)
    used = [sampler.global_batches(epoch)[: len(plan.steps_of(epoch, 0))] for epoch in list(plan.epochs(0))[:epochs]]
    return torch.cat(used).view(-1, train.micro_batch)


def _lengths(samples: Samples) -> NDArray[np.int64] | None:
    lengths = getattr(samples, "lengths", None)
    return None if lengths is None else np.asarray(lengths, dtype=np.int64)


def _token_counts(samples: Samples) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """Return tokens and targets of each sample; None if they are not known without reading the samples.

    The first token of a sample is never a target.
    """
    if isinstance(samples, PackedSamples):
        lengths, targets = _token_counts(samples.samples)
        if lengths is None or targets is None:
            return None, None
        rows = [list(row) for row in samples.rows]
        return _sums(lengths, rows), _sums(targets, rows)
    lengths = _lengths(samples)
    if lengths is None:
        return None, None
    prompts = samples.prompt_lengths if isinstance(samples, TokenSamples) else np.ones_like(lengths)
    return lengths, lengths - np.maximum(prompts, 1)


def _sums(values: NDArray[np.int64], rows: list[list[int]]) -> NDArray[np.int64]:
    return np.array([int(values[row].sum()) for row in rows], dtype=np.int64)

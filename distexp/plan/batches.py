"""The micro-batch of a run that needs the most memory."""

from __future__ import annotations

import numpy as np
import torch

from distexp.config import Config
from distexp.data.base import Batch, TaskData
from distexp.data.sampler import PaddedDataset
from distexp.worker.target_counts import MAX_EPOCHS, lengths_of, token_counts, training_micro_batches

READ_BATCHES = 8
"""Micro-batches that are read and compared if the lengths of the samples are not known."""


def largest_batch(config: Config, data: TaskData) -> Batch:
    """Return the micro-batch of any rank with the most positions, and of those the one with the most targets."""
    samples = PaddedDataset(data.train)
    size = config.train.micro_batch
    if config.model.task != "causal_lm":
        return data.collate([data.train[0]] * size)
    lengths, targets = token_counts(data.train)
    if lengths is None or targets is None:
        first = training_micro_batches(config, data.train, epochs=1)[:READ_BATCHES]
        batches = [data.collate([samples[index] for index in row]) for row in first.tolist()]
        return max(batches, key=lambda batch: (batch.num_positions, batch.num_targets))
    rows = training_micro_batches(config, data.train, epochs=MAX_EPOCHS)
    longest = torch.from_numpy(np.concatenate([lengths, lengths]))[rows].amax(dim=1)
    summed = torch.from_numpy(np.concatenate([targets, np.zeros_like(targets)]))[rows].sum(dim=1)
    worst = int((longest * (int(summed.max()) + 1) + summed).argmax())
    if getattr(data.collate, "length", 1) is not None and config.dataset.padding == "max_length":
        worst = int(summed.argmax())
    return data.collate([samples[index] for index in rows[worst].tolist()])


def evaluation_batch(config: Config, data: TaskData) -> Batch:
    """Return a batch of the evaluation with its longest samples; the first ones if the lengths are not known."""
    size = min(config.train.eval_batch_size or config.train.micro_batch, len(data.evaluation))
    lengths = lengths_of(data.evaluation)
    order = range(len(data.evaluation)) if lengths is None else np.argsort(-lengths, kind="stable").tolist()
    return data.collate([data.evaluation[index] for index in order[:size]])

"""Sizes that have to fit each other, judged without torch: before anything starts where they are known by then."""

from __future__ import annotations

from distexp.config import DatasetConfig, ModelConfig


def check_sequence_length(dataset: DatasetConfig, model: ModelConfig) -> str | None:
    """What is wrong with texts longer than the positions of a model; None where they fit."""
    if dataset.max_length is None or model.seq_length is None or dataset.max_length <= model.seq_length:
        return None
    return (
        f"dataset.max_length={dataset.max_length} exceeds model.seq_length={model.seq_length}, the positions that "
        f"model={model.name} has: lower the first or raise the second"
    )


def check_samples_per_rank(samples: int, workers: int, micro_batch_size: int) -> str | None:
    """What is wrong with micro-batches that no worker can fill: they would be filled up, and measure filling."""
    share = -(-samples // workers)
    if micro_batch_size <= share:
        return None
    return (
        f"train.micro_batch_size={micro_batch_size} is more than the {share} of {samples} samples that each of "
        f"{workers} workers has: lower it, or raise dataset.train_size"
    )

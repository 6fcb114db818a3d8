"""Sizes of the batches of a training: micro-batch, accumulation and global batch."""

from __future__ import annotations

from dataclasses import replace

from distexp.config import Config

AUTO = "auto"
"""Value of ``train.micro_batch_size`` for which the workers search the size."""


def searches_micro_batch(config: Config) -> bool:
    """Return whether the workers search the micro-batch size."""
    return config.train.micro_batch_size == AUTO


def depends_on_micro_batch(config: Config) -> bool:
    """Return whether another micro-batch may be another training: a batch norm uses the statistics of a micro-batch.

    Most image models have batch norms. Whether a custom one has none is not known before it is built.
    """
    return config.model.task == "image_classification"


def samples_per_worker(config: Config) -> int:
    """Return the samples of an optimizer step on each worker, for a configuration with a global batch size."""
    assert config.train.global_batch_size is not None, "resolve() requires it for micro_batch_size=auto"
    return config.train.global_batch_size // config.cluster.world_size


def divisors(number: int, limit: int | None = None) -> list[int]:
    """Return the divisors of a number up to a limit, in ascending order: the micro-batches that keep a global batch."""
    largest = number if limit is None else min(number, limit)
    return [size for size in range(1, largest + 1) if number % size == 0]


def with_micro_batch(config: Config, size: int, accumulation: int | None = None) -> Config:
    """Return a configuration with a micro-batch size.

    Args:
        config: the configuration.
        size: samples per worker and forward pass.
        accumulation: micro-batches per optimizer step; None: as many as give the global batch size.
    """
    steps = samples_per_worker(config) // size if accumulation is None else accumulation
    return replace(config, train=replace(config.train, micro_batch_size=size, gradient_accumulation_steps=steps))

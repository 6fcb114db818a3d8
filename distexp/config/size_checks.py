"""Checks of sizes that must fit together, without importing torch."""

from __future__ import annotations

from distexp.config import DatasetConfig, ModelConfig
from distexp.config.batch_sizes import divisors


def check_sequence_length(dataset: DatasetConfig, model: ModelConfig) -> str | None:
    """Return an error if texts may be longer than the positions of the model."""
    if dataset.max_length is None or model.seq_length is None or dataset.max_length <= model.seq_length:
        return None
    return (
        f"dataset.max_length={dataset.max_length} exceeds model.seq_length={model.seq_length}, the most positions of "
        f"model={model.name}: lower the first or raise the second"
    )


def check_samples_per_rank(
    samples: int, workers: int, micro_batch_size: int, *, global_batch: int | None = None, unit: str = "samples"
) -> str | None:
    """Return an error if a micro-batch is larger than the samples of a rank.

    Such a micro-batch would be padded, and its speed would be that of padding.

    Args:
        samples: samples of the training set.
        workers: workers that share them.
        micro_batch_size: samples per worker and forward pass.
        global_batch: samples of a step, if they are set. Other micro-batches must divide those of a worker.
        unit: ``samples``, or ``rows`` of packed samples.
    """
    per_rank = -(-samples // workers)
    if micro_batch_size <= per_rank:
        return None
    share = f"{per_rank} {unit if per_rank > 1 else unit[:-1]}"
    hint = (
        _fitting_sizes(samples, workers, micro_batch_size)
        if global_batch is None
        else _divisor(global_batch // workers, per_rank)
    )
    return (
        f"train.micro_batch_size={micro_batch_size} is more than the {share} of each worker ({samples} {unit}, "
        f"{workers} workers): use {hint}a larger dataset.train_size"
    )


def _fitting_sizes(samples: int, workers: int, micro_batch_size: int) -> str:
    """Return the largest micro-batch for these workers, and the most workers for this micro-batch, as alternatives."""
    most = (samples - 1) // max(1, micro_batch_size - 1)
    fewer = f" at most {most} worker{'s' if most > 1 else ''}," if most else ""
    return f"train.micro_batch_size={-(-samples // workers)},{fewer} or "


def _divisor(whole: int, largest: int) -> str:
    """Return the largest micro-batch up to a limit that divides the samples of a worker, as an alternative."""
    divisor = max(divisors(whole, largest), default=None)
    return f"train.micro_batch_size={divisor}, or " if divisor else ""


def several_lengths(dataset: DatasetConfig) -> str:
    """Return the setting because of which batches have different lengths; empty if all have the same."""
    if dataset.bucketing:
        return "dataset.bucketing=true"
    return "dataset.padding=longest" if dataset.padding == "longest" else ""  # packed rows are not all full

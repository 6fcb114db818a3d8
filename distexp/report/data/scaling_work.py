"""Work of a training: how many samples it processes, with how many parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distexp.report.data.repeats import RunGroup
from distexp.report.data.setting_names import WORKERS

TOLERANCE = 0.05  # relative difference of equal work; the last step of an epoch may be incomplete


class World(NamedTuple):
    """Numbers of workers and of nodes, by which a series is sorted."""

    workers: int
    nodes: int


def world_of(group: RunGroup) -> World:
    """Return the workers and nodes of a training."""
    return World(int(group.setting(WORKERS)), int(group.setting("nodes") or 1))


def parameters_of(group: RunGroup) -> int:
    """Return the number of parameters; 0 if unknown."""
    built = group.counted_rows[0].record.built
    return built.parameters if built else 0


def works_of(groups: Sequence[RunGroup]) -> list[float]:
    """Return the work of each group: samples, times parameters if these differ."""
    counts = sample_counts(groups)
    parameters = [parameters_of(group) for group in groups]
    if min(parameters) > 0 and len(set(parameters)) > 1:
        return [count * size for count, size in zip(counts, parameters, strict=True)]
    return counts


def sample_counts(groups: Sequence[RunGroup]) -> list[float]:
    """Return the samples that each group processes; 1 for all if a number is unknown, as if all were equal."""
    counts = [count for group in groups if (count := samples_of(group))]
    return counts if len(counts) == len(groups) else [1.0] * len(groups)


def samples_of(group: RunGroup) -> float | None:
    """Return the samples that a training processes; None if unknown."""
    return _packed_samples(group) if group.setting("dataset.packing") else _padded_samples(group)


def _packed_samples(group: RunGroup) -> float | None:
    """Return the samples of a training whose rows have several samples each; None if unknown."""
    metrics, size = group.counted_rows[0].record.metrics, group.setting("dataset.train_size")
    if not size or not metrics.total_steps or not metrics.steps_per_epoch:
        return None
    return float(size * metrics.total_steps / metrics.steps_per_epoch)


def _padded_samples(group: RunGroup) -> float | None:
    """Return the samples of a training with a sample in each row; None if unknown."""
    names = ("micro_batch_size", "gradient_accumulation_steps", "num_epochs", "dataset.train_size", "max_steps")
    micro, accumulation, epochs, size, max_steps = (group.setting(name) for name in names)
    steps = group.counted_rows[0].record.metrics.total_steps or max_steps
    bounds = [size * epochs] if size and epochs else []
    if steps and accumulation and isinstance(micro, (int, float)):
        bounds.append(steps * micro * accumulation * world_of(group).workers)
    return min(bounds, default=None)


def is_constant(values: Sequence[float]) -> bool:
    """Return whether values of at least 0 are equal, up to TOLERANCE."""
    return max(values) - min(values) <= TOLERANCE * max(values)

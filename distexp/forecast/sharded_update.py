"""The optimizer part of a step with another number of workers, if they shard the optimizer states.

A worker then updates its share of the elements, so the kernels of the update and of the norm take less time. How many
kernels there are depends on the strategy:

- FSDP and ZeRO-3 divide each parameter. Each worker has a part of all of them, and launches as many kernels.
- ZeRO-1 and ZeRO-2 divide each group of the optimizer, whose parameters are in one flat tensor. Check and norm launch
  kernels for each parameter in the part of a worker, and the workers have different numbers of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from distexp.forecast.simulate import Scales, scaled_tail
from distexp.runs.step_model import OPTIMIZER, Item, Segment
from distexp.strategies.step_collectives import StepCommunication

SHORTEST_KERNEL_S = 2e-6
"""Time of a kernel with hardly any work: an assumption."""
FEWEST_LAUNCHES = 32
"""Launches of a segment from which they are those of a loop over parameters. Flat tensors need fewer: an assumption."""
SMALL_PARAMETER_S = 40e-6
"""Time of a CPU to update a parameter of 1,000 elements with AdamW: 33 us on a 2-core machine, and its norm."""

Groups = Sequence[Sequence[int]]
"""Elements of each parameter in each group of the optimizer."""


@dataclass(frozen=True)
class UpdateShare:
    """What a worker updates.

    Attributes:
        elements: Elements of the worker with the most.
        parameters: Parameters of which the worker with the most has a part.
    """

    elements: int
    parameters: int


def update_share(groups: Groups, communication: StepCommunication, shards: int) -> UpdateShare:
    """Return what a worker updates.

    Args:
        groups: The parameters of the optimizer.
        communication: What the strategy states about its update.
        shards: Workers over which the optimizer states are sharded.
    """
    if communication.flattens_groups:
        parts = [-(-sum(group) // shards) for group in groups]
        counts = [_parameters_by_worker(group, part, shards) for group, part in zip(groups, parts, strict=True)]
        return UpdateShare(sum(parts), max(map(sum, zip(*counts, strict=True)), default=0))
    elements = sum(-(-size // shards) for group in groups for size in group)
    return UpdateShare(elements, sum(len(group) for group in groups))


def _parameters_by_worker(group: Sequence[int], part: int, shards: int) -> list[int]:
    """Return how many parameters of a flat group each worker has a part of.

    Args:
        group: Elements of each parameter.
        part: Elements of a worker.
        shards: Number of workers.
    """
    starts = [0] * (shards + 1)  # differences between a worker and the one before
    end = 0
    for elements in group:
        first, end = end // part, end + elements
        starts[first] += 1
        starts[(end - 1) // part + 1] -= 1
    return list(accumulate(starts))[:shards]


def shard_update(
    items: Sequence[Item],
    before: UpdateShare,
    after: UpdateShare,
    communication: StepCommunication,
    *,
    on_gpu: bool,
) -> tuple[Item, ...]:
    """Return the items of a step with the update of another share.

    Args:
        items: Items of the profiled step.
        before: What a worker of the profiled run updates.
        after: What a worker updates instead.
        communication: What the strategy states about its update.
        on_gpu: Whether the worker uses a GPU.
    """
    update = [item for item in items if _is_update(item)]
    elements = after.elements / before.elements
    updates_on_cpu = communication.offloads or not on_gpu
    host = _factor_on_cpu(update, elements, after.parameters) if updates_on_cpu else 1.0
    parameters = after.parameters / before.parameters if communication.flattens_groups else 1.0

    def shrink(item: Item) -> Item:
        if not isinstance(item, Segment) or not _is_update(item):
            return item
        is_loop = item.launches >= FEWEST_LAUNCHES
        launches = parameters if is_loop else 1.0
        return _scale(item, host if updates_on_cpu else launches, elements, launches)

    return tuple(map(shrink, items))


def _is_update(item: Item) -> bool:
    return isinstance(item, Segment) and item.phase == OPTIMIZER


def _factor_on_cpu(update: Sequence[Item], elements: float, parameters: int) -> float:
    """Return the factor of the time of a CPU that does the update.

    Args:
        update: The segments of the update.
        elements: Factor of the elements.
        parameters: Parameters of which a worker has a part.
    """
    host_s = sum(item.host_s for item in update)
    least_s = min(host_s, parameters * SMALL_PARAMETER_S)
    return max(elements, least_s / host_s) if host_s else 1.0


def _scale(item: Segment, host: float, elements: float, launches: float) -> Segment:
    """Return a segment of an update of other elements.

    Args:
        item: The segment.
        host: Factor of the time of the CPU.
        elements: Factor of the elements, and so of the time of a long kernel.
        launches: Factor of the number of kernels.
    """
    count = round(launches * item.launches)
    device_s = max(elements * item.device_s, min(item.device_s, count * SHORTEST_KERNEL_S))
    device = device_s / item.device_s if item.device_s else 1.0
    return replace(
        item,
        host_s=host * item.host_s,
        device_s=device_s,
        tail_s=scaled_tail(item, Scales(host, device)),
        tail_half_s=scaled_tail(item, Scales(host / 2, device)),
        launches=count,
    )

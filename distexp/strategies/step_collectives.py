"""The collectives of a step: what a strategy states about them, and their insertion into a profiled step.

A subclass of ``StepCommunication`` belongs to each strategy, next to it. The forecast of a run and the search of a
configuration ask it, and know no strategy by name. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from distexp.runs.step_model import BACKWARD, OPTIMIZER, Collective, Item, Segment, StepModel

REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
GATHERS = ("all_gather", "broadcast")

LAUNCH_S = 100e-6
"""Time of the CPU to start a collective of a sharded unit: flat buffers, copies into them, events and the call. An
assumption, for a run in which one worker skips them."""

SCALAR_BYTES = 4
"""Size of a sum over the workers, as that of the gradient norm."""


@dataclass(frozen=True, kw_only=True)
class StepCommunication:
    """The collectives of a step, and the share of the update of each worker.

    The values of this class are for a strategy of which nothing is known but its trace. It is taken to reduce all
    gradients once per step.

    Attributes:
        weight_bytes: Bytes per element of a gathered weight.
        gradient_bytes: Bytes per element of a reduced gradient.
        offloads: Whether the optimizer states are in CPU memory, so that the CPU updates the weights.
        is_planned: Whether ``plan`` knows the collectives before a run on several workers shows them.
    """

    weight_bytes: int = 4
    gradient_bytes: int = 4
    offloads: bool = False

    is_planned: ClassVar[bool] = False

    @property
    def shards_optimizer(self) -> bool | None:
        """Return whether the workers of a replica share the optimizer states; None if that is unknown."""
        return None

    @property
    def flattens_groups(self) -> bool:
        """Return whether a worker updates a part of each flat group, and not a part of each parameter."""
        return False

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Return whether gradients are reduced in each micro-batch, not only in the last one."""
        return False

    @property
    def gathers_once(self) -> bool:
        """Return whether weights are gathered in the first micro-batch and kept for the others."""
        return False

    @property
    def gathers_modules(self) -> bool:
        """Return whether weights are gathered for each module, so that a plan needs the modules of the model."""
        return False

    def mesh(self, workers: int, nodes: int) -> tuple[int, int]:
        """Return the number of replicas, and the workers over which each is sharded."""
        return 1, workers

    def optimizer_shards(self, workers: int, nodes: int) -> int:
        """Return over how many workers the optimizer states are sharded; 1 if each worker has all of them."""
        return self.mesh(workers, nodes)[1] if self.shards_optimizer else 1

    def bytes_per_parameter(self, micro_batches: int) -> int:
        """Return what the workers of a replica exchange in a step. An all-reduce sends each value twice."""
        return 2 * self.gradient_bytes * (micro_batches if self.reduces_each_micro_batch else 1)

    def plan(self, items: list[Item], model: StepModel, micro_batches: int) -> list[Item]:
        """Return the items of a step of one worker with the collectives of several.

        Args:
            items: Items of the step, as measured with one worker.
            model: The profiled step, with the parameters of the model.
            micro_batches: Micro-batches of the step.
        """
        return items

    def with_replicas(self, items: Sequence[Item], replicas: int, shard: int) -> tuple[Item, ...]:
        """Return the items with the collectives between replicas that one replica did not have.

        Args:
            items: Items of the step.
            replicas: Number of replicas.
            shard: Workers of each.
        """
        return tuple(items)

    def with_waits(self, item: Collective, *, on_gpu: bool) -> Collective:
        """Return a collective with its process group and what waits for it, which a trace does not show."""
        return item

    def reduction_sizes(self, model: StepModel, count: int) -> Sequence[int]:
        """Return the bytes of the reductions of a backward pass whose trace has no sizes; they are equal if unknown.

        Args:
            model: The profiled step.
            count: Number of reductions.
        """
        return [element_count(model) * self.gradient_bytes // count] * count


def element_count(model: StepModel) -> int:
    """Return the number of elements of all parameters of a model."""
    return sum(sum(unit.elements) for unit in model.units)


def is_gradient_reduction(item: Item) -> bool:
    """Return whether an item reduces gradients."""
    return isinstance(item, Collective) and item.phase == BACKWARD and item.kind in REDUCTIONS


def work(item: Item) -> float:
    """Return the time that measures how far a pass is: that of the device, or of the CPU if there is none."""
    return (item.device_s or item.host_s) if isinstance(item, Segment) else 0.0


def insert(items: list[Item], new: Collective, share: float) -> None:
    """Insert a collective into the pass of its micro-batch, after this share of the work of the pass.

    Later calls with the same share insert after earlier ones.
    """
    inside = [i for i, item in enumerate(items) if (item.phase, item.micro_batch) == (new.phase, new.micro_batch)]
    if not inside:
        items.append(new)
        return
    total, done, place = sum(work(items[i]) for i in inside), 0.0, inside[0]
    for i in inside:
        reached = done >= share * total - 1e-9 * total
        if reached and isinstance(items[i], Segment):
            break
        done += work(items[i])
        place = i + 1
    items.insert(place, new)


def segments_before(items: Sequence[Item], phase: str, micro_batch: int, share: float) -> int:
    """Return how many segments of a pass are before the place at which ``insert`` inserts for a share of its work."""
    inside = [
        item for item in items if isinstance(item, Segment) and (item.phase, item.micro_batch) == (phase, micro_batch)
    ]
    total, done = sum(map(work, inside)), 0.0
    for number, segment in enumerate(inside):
        if done >= share * total - 1e-9 * total:
            return number
        done += work(segment)
    return len(inside)


def insert_buckets(items: list[Item], buckets: Sequence[int], micro_batch: int, *, awaited: str) -> list[Item]:
    """Insert all-reduces into a backward pass: each bucket is ready after its share of the parameters.

    Args:
        items: Items of the step; changed in place.
        buckets: Bytes of each bucket.
        micro_batch: Number of the micro-batch.
        awaited: What waits for the reductions.
    """
    done, total = 0, sum(buckets) or 1
    for size in buckets:
        done += size
        new = Collective("all_reduce", size, 1, "all", BACKWARD, micro_batch, awaited=awaited)
        insert(items, new, done / total)
    return items


def add_norm(items: list[Item]) -> list[Item]:
    """Add the sum of the gradient norm over the workers, before the optimizer, unless the trace has one."""
    if any(isinstance(item, Collective) and item.phase == OPTIMIZER for item in items):
        return items
    first = next((i for i, item in enumerate(items) if item.phase == OPTIMIZER), len(items))
    micro_batch = items[-1].micro_batch if items else 0
    return [*items[:first], Collective("all_reduce", SCALAR_BYTES, 1, "all", OPTIMIZER, micro_batch), *items[first:]]

"""The collectives of a step: what a strategy states about them, and their insertion into a profiled step.

Each strategy has a subclass of ``StepCommunication``, which forecasts and searches ask. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

from distexp.config import Config
from distexp.distributed.context import Context
from distexp.runs import step_files
from distexp.runs.step_files import (
    BACKWARD,
    COPIES,
    FORWARD,
    GROUP,
    NEXT,
    OPTIMIZER,
    Collective,
    Item,
    Parameters,
    Segment,
    StepModel,
)
from distexp.strategies.parallel.checks import bubble_share

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LAUNCH_S = 100e-6
"""Time of the CPU to start a collective of a sharded unit: flat buffers, copies into them, events and the call. An
assumption, for a run in which one worker skips them."""

SCALAR_BYTES = 4
"""Size of a sum over the workers, as that of the gradient norm."""

LARGEST_SUM = 8
"""Bytes of the largest sum of one number over all workers, such as the targets of a step."""


@dataclass(frozen=True, kw_only=True)
class StepCommunication:
    """The collectives of a step, and the share of the update of each worker.

    The values of this class are for a strategy of which nothing is known but its trace. It is taken to reduce all
    gradients once per step.
    """

    weight_bytes: int = 4  # bytes per element of a gathered weight
    gradient_bytes: int = 4  # bytes per element of a reduced gradient
    offloads: bool = False  # whether the optimizer states are in CPU memory, so that the CPU updates the weights
    trained_share: float = 1.0  # share of the parameters that have gradients and are updated
    group: int = 1  # workers that share a model (section ``parallel``)
    cuts_weights: bool = False  # whether each of them has a part of all weights: ``parallel.tensor`` or ``.pipeline``
    pipeline: int = 1  # ``parallel.pipeline``
    schedule: str = "1f1b"  # ``parallel.schedule``

    is_planned: ClassVar[bool] = False  # whether ``plan`` knows them before a run on several workers shows them

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

    def copies(self, workers: int) -> int:
        """Return how many workers have the same part of the weights, if the strategy shards nothing."""
        return max(1, workers // self.group) if self.cuts_weights else workers

    def is_of_group(self, item: Collective) -> bool:
        """Return whether a collective of a profiled run is one between workers that share a model."""
        if self.group == 1 or item.transfer_s is None:
            return False
        if not self.cuts_weights:
            return item.kind == "all_to_all"
        is_sum = item.kind == "all_reduce" and (item.bytes or 0) <= LARGEST_SUM
        # gloo states no sizes. Workers with shared matrices sum activations, and those of a pipeline numbers only.
        return item.phase != OPTIMIZER and not (is_sum and (item.bytes or self.pipeline > 1))

    def pass_ratio(self, before: int, after: int) -> float:
        """Return how much longer the passes of a pipeline take with another number of micro-batches."""
        first, second = (count / (1 - bubble_share(self.pipeline, self.schedule, count)) for count in (before, after))
        return second / first

    def mesh(self, workers: int, nodes: int) -> tuple[int, int]:
        """Return the number of replicas, and the workers over which each is sharded."""
        return 1, workers

    def optimizer_shards(self, workers: int, nodes: int) -> int:
        """Return over how many workers the optimizer states are sharded; 1 if each worker has all of them."""
        return self.mesh(workers, nodes)[1] if self.shards_optimizer else 1

    def bytes_per_parameter(self, micro_batches: int) -> float:
        """Return what the workers of a replica exchange in a step. An all-reduce sends each value twice."""
        return 2 * self.trained_share * self.gradient_bytes * (micro_batches if self.reduces_each_micro_batch else 1)

    def plan(self, items: list[Item], model: StepModel, micro_batches: int) -> list[Item]:
        """Return the items of a step of one worker with the collectives of several."""
        return items

    def with_replicas(self, items: Sequence[Item], replicas: int, shard: int) -> tuple[Item, ...]:
        """Return the items with the collectives between replicas that one replica did not have."""
        return tuple(items)

    def with_waits(self, item: Collective, *, on_gpu: bool) -> Collective:
        """Return a collective with its process group and what waits for it, which a trace does not show."""
        return item

    def reduction_sizes(self, model: StepModel, count: int) -> Sequence[int]:
        """Return the bytes of the reductions of a backward pass whose trace has no sizes; they are equal if unknown."""
        return [element_count(model) * self.gradient_bytes // count] * count


def element_count(model: StepModel) -> int:
    """Return the number of elements of all gradients of a model."""
    return sum(sum(unit.reduced) for unit in model.units)


def is_gradient_reduction(item: Item) -> bool:
    """Return whether an item reduces gradients."""
    reduces = isinstance(item, Collective) and item.kind in step_files.REDUCTIONS and item.axis != GROUP
    return reduces and item.phase == BACKWARD


def work(item: Item) -> float:
    """Return the time that measures how far a pass is: that of the device, or of the CPU if there is none."""
    return (item.device_s or item.host_s) if isinstance(item, Segment) else 0.0


def insert(items: list[Item], new: Collective, share: float) -> None:
    """Insert a collective into its pass after this share of its work, and after earlier ones with the same share."""
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
    total, ends = sum(map(work, inside)), [0.0, *accumulate(map(work, inside))]
    return next((number for number, done in enumerate(ends) if done >= share * total - 1e-9 * total), len(inside))


def insert_buckets(
    items: list[Item], buckets: Sequence[int], micro_batch: int, *, awaited: str, scatters: bool = False
) -> list[Item]:
    """Insert reductions into a backward pass in place: each bucket is ready after its share of the parameters."""
    done, total = 0, sum(buckets) or 1
    for size in buckets:
        done += size
        all_reduce = Collective("all_reduce", size, 1, "all", BACKWARD, micro_batch, awaited=awaited)
        insert(items, reduce_scatter(size, micro_batch, awaited=awaited) if scatters else all_reduce, done / total)
    return items


def reduce_scatter(size: int, micro_batch: int, *, awaited: str = OPTIMIZER) -> Collective:
    """Return the reduction of the gradients of a unit or bucket, in bytes, to the shards."""
    return Collective("reduce_scatter", size, 1, "shard", BACKWARD, micro_batch, LAUNCH_S, awaited=awaited)


def add_norm(items: list[Item]) -> list[Item]:
    """Add the sum of the gradient norm over the workers, before the optimizer, unless the trace has one."""
    if any(isinstance(item, Collective) and item.phase == OPTIMIZER for item in items):
        return items
    first = next((i for i, item in enumerate(items) if item.phase == OPTIMIZER), len(items))
    micro_batch = items[-1].micro_batch if items else 0
    return [*items[:first], Collective("all_reduce", SCALAR_BYTES, 1, "all", OPTIMIZER, micro_batch), *items[first:]]


class Sharding(StrEnum):
    """A value of ``fsdp.sharding``."""

    FULL_SHARD = "full_shard"
    SHARD_GRAD_OP = "shard_grad_op"
    HYBRID_SHARD = "hybrid_shard"
    NO_SHARD = "no_shard"

    @property
    def reshards_after_forward(self) -> bool:
        """Return whether parameters are gathered again for the backward pass."""
        return self is not Sharding.SHARD_GRAD_OP

    @property
    def shards_over_all_workers(self) -> bool:
        """Return whether each worker holds an equal share of all states, not a replica."""
        return self in (Sharding.FULL_SHARD, Sharding.SHARD_GRAD_OP)

    def mesh_shape(self, workers: int, *, nodes: int, replicas: int | None = None) -> tuple[int, int]:
        """Return the mesh axes (replicate, shard). By default, hybrid_shard has one replica per node."""
        by_sharding = {Sharding.NO_SHARD: workers, Sharding.HYBRID_SHARD: replicas or nodes}
        replicate = by_sharding.get(self, 1)
        return replicate, workers // replicate


def sharding_of(config: Config) -> Sharding:
    """Return the sharding of a configuration whose defaults are set."""
    return Sharding(config.fsdp.sharding or Sharding.FULL_SHARD)


def mesh_shape(config: Config) -> tuple[int, int]:
    """Return the mesh axes (replicate, shard)."""
    return sharding_of(config).mesh_shape(
        sharding_workers(config), nodes=config.cluster.nodes, replicas=config.fsdp.replicas
    )


def sharding_workers(config: Config) -> int:
    """Return how many workers have the same part of the model, which the strategy shards or replicates over them."""
    return config.cluster.world_size // (config.parallel.tensor * config.parallel.pipeline)


ONE_WORKER_AXIS = {
    (True, False): "so nothing is replicated, as with full_shard: use several nodes, or set fsdp.replicas",
    (False, True): "so nothing is sharded",
    (True, True): "so nothing is replicated or sharded",
}
"""What a mesh does whose axes (replicate, shard) have one worker or more."""


TORCH_PREFETCH = {"forward_prefetch": 0, "backward_prefetch": 1}
"""Number of blocks that torch prefetches by default."""


DATA, STAGES, TENSOR = "data", "pipeline", "tensor"
"""Axes of the mesh of the section ``parallel``. Workers that share layers have consecutive ranks, on one node."""

REPLICATE, SHARD = "replicate", "shard"
"""Axes of a mesh with replicas. With the section ``parallel`` they are in place of DATA."""


def build_shared_mesh(config: Config, context: Context) -> DeviceMesh:
    """Build the mesh (data, pipeline, tensor), without the last two axes if they have one worker."""
    from torch.distributed.device_mesh import init_device_mesh

    axes = {DATA: sharding_workers(config)}
    if not sharding_of(config).shards_over_all_workers:
        axes = dict(zip((REPLICATE, SHARD), _replicated_shape(config, context), strict=True))
    axes |= {name: size for name, size in ((STAGES, context.stages), (TENSOR, context.tensor)) if size > 1}
    return init_device_mesh(context.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def data_mesh(shared: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the workers that have the same part of the model."""
    return shared[DATA] if DATA in (shared.mesh_dim_names or ()) else shared[REPLICATE, SHARD]


EXPERT_DATA, EXPERT = "expert_data", "expert"
"""Axes of the mesh of the experts with ``parallel.expert``. Workers that share them have consecutive ranks."""


def build_expert_mesh(config: Config, context: Context) -> DeviceMesh:
    """Build the mesh (expert_data, expert): workers with the same experts, and those with the other ones."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = (context.world_size // config.parallel.expert, config.parallel.expert)
    return init_device_mesh(context.device.type, shape, mesh_dim_names=(EXPERT_DATA, EXPERT))


def build_mesh(config: Config, context: Context) -> DeviceMesh:
    """Build the mesh of a strategy without the section ``parallel``."""
    from torch.distributed.device_mesh import init_device_mesh

    if sharding_of(config).shards_over_all_workers:
        return init_device_mesh(context.device.type, mesh_shape(config)[1:], mesh_dim_names=(SHARD,))
    shape = _replicated_shape(config, context)
    return init_device_mesh(context.device.type, shape, mesh_dim_names=(REPLICATE, SHARD))


def _replicated_shape(config: Config, context: Context) -> tuple[int, int]:
    """Return the axes of a mesh with replicas; rank 0 prints a note if one of them has only one worker."""
    replicate, shard = mesh_shape(config)
    if context.rank == 0 and (effect := ONE_WORKER_AXIS.get((replicate == 1, shard == 1))):
        print(
            f"sharding={config.fsdp.sharding}: the mesh (replicate, shard) is ({replicate}, {shard}), {effect}",
            flush=True,
        )
    return replicate, shard


@dataclass(frozen=True, kw_only=True)
class FSDPCommunication(StepCommunication):
    """The collectives of a step with FSDP, which reduces gradients in fp32. See docs/decisions/forecast-model.md."""

    sharding: Sharding = Sharding.FULL_SHARD  # ``fsdp.sharding``
    replicas: int | None = None  # ``fsdp.replicas``
    backward_prefetch: int = 1  # ``fsdp.backward_prefetch``

    is_planned: ClassVar[bool] = True

    @property
    def shards_optimizer(self) -> bool:
        """Return whether something is sharded."""
        return self.sharding is not Sharding.NO_SHARD

    @property
    def gathers_once(self) -> bool:
        """Return whether the weights stay gathered after the forward pass."""
        return not self.sharding.reshards_after_forward

    def mesh(self, workers: int, nodes: int) -> tuple[int, int]:
        """Return the number of replicas, and the workers over which each is sharded."""
        return self.sharding.mesh_shape(workers, nodes=nodes, replicas=self.replicas)

    def bytes_per_parameter(self, micro_batches: int) -> float:
        """Return what the workers of a replica exchange: the weights for each pass, and the gradients once."""
        gathers = 1 if self.gathers_once else 2 * micro_batches
        return gathers * self.weight_bytes + self.trained_share * self.gradient_bytes

    def plan(self, items: list[Item], model: StepModel, micro_batches: int) -> list[Item]:
        """Return the items with the collectives of FSDP, at the places of its hooks if the trace has them."""
        if not self.shards_optimizer:
            sizes = [sum(unit.reduced) * self.gradient_bytes for unit in reversed(model.units) if unit.reduced]
            return add_norm(insert_buckets(items, sizes, micro_batches - 1, awaited=OPTIMIZER))
        if any(isinstance(item, Collective) and item.axis in ("shard", COPIES) and item.bytes for item in items):
            return add_norm(items)
        return add_norm(self._plan_units(items, model.units, micro_batches))

    def _plan_units(self, items: list[Item], units: Sequence[Parameters], micro_batches: int) -> list[Item]:
        """Insert the all-gathers and reduce-scatters of sharded units; the work of a unit is as its parameters."""
        sizes = [sum(unit.elements) for unit in units]
        total = sum(sizes) or 1

        def gather(elements: int, phase: str, micro_batch: int, ahead: int = 0) -> Collective:
            size = elements * self.weight_bytes
            return Collective(
                "all_gather", size, 1, "shard", phase, micro_batch, LAUNCH_S, ahead=ahead, after_compute=False
            )

        for micro_batch in range(micro_batches):
            gathers = micro_batch == 0 or not self.gathers_once
            gathers_again = gathers and self.sharding.reshards_after_forward
            if gathers:
                for position, size in enumerate(sizes):
                    insert(items, gather(size, FORWARD, micro_batch), sum(sizes[:position]) / total)
            done = 0
            for size, unit in zip(reversed(sizes), reversed(units), strict=True):
                if gathers_again:
                    insert(items, gather(size, BACKWARD, micro_batch, ahead=self.backward_prefetch), done / total)
                done += size
                if micro_batch == micro_batches - 1 and (reduced := sum(unit.reduced)):
                    insert(items, reduce_scatter(reduced * self.gradient_bytes, micro_batch), done / total)
        return items

    def with_replicas(self, items: Sequence[Item], replicas: int, shard: int) -> tuple[Item, ...]:
        """Return the items with the all-reduces of ``hybrid_shard``, if the profiled run had none."""
        is_hybrid = self.sharding is Sharding.HYBRID_SHARD
        if not is_hybrid or replicas == 1 or any(isinstance(i, Collective) and i.axis == "replicate" for i in items):
            return tuple(items)
        found: list[Item] = []
        for item in items:
            found.append(item)
            if isinstance(item, Collective) and item.kind == "reduce_scatter" and item.axis == "shard" and item.bytes:
                size = item.bytes // shard
                new = replace(
                    item, kind="all_reduce", bytes=size, axis="replicate", ranks=1, host_s=0.0, transfer_s=None
                )
                found.append(new)
        return tuple(found)

    def with_waits(self, item: Collective, *, on_gpu: bool) -> Collective:
        """Return a collective with what waits for it: the optimizer for reductions. A gather needs no result.

        In the backward pass a gather is launched ``fsdp.backward_prefetch`` units ahead. With gloo the CPU waits for
        each collective.
        """
        if is_gradient_reduction(item):
            axis = "replicate" if item.kind == "all_reduce" else "shard"
            return replace(item, axis=axis, awaited=OPTIMIZER if on_gpu else NEXT)
        if item.kind in step_files.GATHERS:
            ahead = self.backward_prefetch if on_gpu and item.phase == BACKWARD else 0
            return replace(item, axis="shard", ahead=ahead, after_compute=False)
        return item

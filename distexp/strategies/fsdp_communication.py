"""The collectives of a step with FSDP: all-gathers and reduce-scatters of units, or the all-reduces of ``no_shard``.

See docs/decisions/forecast-model.md for the sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from distexp.runs.step_model import BACKWARD, FORWARD, NEXT, OPTIMIZER, Collective, Item, Parameters, StepModel
from distexp.strategies.fsdp_mesh import Sharding
from distexp.strategies.step_collectives import (
    GATHERS,
    LAUNCH_S,
    StepCommunication,
    add_norm,
    insert,
    insert_buckets,
    is_gradient_reduction,
)


@dataclass(frozen=True, kw_only=True)
class FSDPCommunication(StepCommunication):
    """The collectives of a step with FSDP, which reduces gradients in fp32.

    Attributes:
        sharding: ``fsdp.sharding``.
        replicas: ``fsdp.replicas``.
        backward_prefetch: ``fsdp.backward_prefetch``.
    """

    sharding: Sharding = Sharding.FULL_SHARD
    replicas: int | None = None
    backward_prefetch: int = 1

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

    def bytes_per_parameter(self, micro_batches: int) -> int:
        """Return what the workers of a replica exchange: the weights for each pass, and the gradients once."""
        gathers = 1 if self.gathers_once else 2 * micro_batches
        return gathers * self.weight_bytes + self.gradient_bytes

    def plan(self, items: list[Item], model: StepModel, micro_batches: int) -> list[Item]:
        """Return the items with the collectives of FSDP, at the places of its hooks if the trace has them."""
        if not self.shards_optimizer:
            sizes = [sum(unit.elements) * self.gradient_bytes for unit in reversed(model.units)]
            return add_norm(insert_buckets(items, sizes, micro_batches - 1, awaited=OPTIMIZER))
        if any(isinstance(item, Collective) and item.axis == "shard" and item.bytes for item in items):
            return add_norm(items)
        return add_norm(self._plan_units(items, model.units, micro_batches))

    def _plan_units(self, items: list[Item], units: Sequence[Parameters], micro_batches: int) -> list[Item]:
        """Insert the all-gathers and reduce-scatters of sharded units; the work of a unit is as its parameters."""
        sizes = [sum(unit.elements) for unit in units]
        total = sum(sizes) or 1
        for micro_batch in range(micro_batches):
            gathers = micro_batch == 0 or not self.gathers_once
            gathers_again = gathers and self.sharding.reshards_after_forward
            if gathers:
                for position, size in enumerate(sizes):
                    insert(items, self._gather(size, FORWARD, micro_batch), sum(sizes[:position]) / total)
            done = 0
            for size in reversed(sizes):
                if gathers_again:
                    insert(items, self._gather(size, BACKWARD, micro_batch), done / total)
                done += size
                if micro_batch == micro_batches - 1:
                    insert(items, self._scatter(size, micro_batch), done / total)
        return items

    def _gather(self, elements: int, phase: str, micro_batch: int) -> Collective:
        ahead, size = self.backward_prefetch if phase == BACKWARD else 0, elements * self.weight_bytes
        return Collective(
            "all_gather", size, 1, "shard", phase, micro_batch, LAUNCH_S, ahead=ahead, after_compute=False
        )

    def _scatter(self, elements: int, micro_batch: int) -> Collective:
        size = elements * self.gradient_bytes
        return Collective("reduce_scatter", size, 1, "shard", BACKWARD, micro_batch, LAUNCH_S, awaited=OPTIMIZER)

    def with_replicas(self, items: Sequence[Item], replicas: int, shard: int) -> tuple[Item, ...]:
        """Return the items with the all-reduces of ``hybrid_shard``, if the profiled run had none."""
        is_hybrid = self.sharding is Sharding.HYBRID_SHARD
        if not is_hybrid or replicas == 1 or any(isinstance(i, Collective) and i.axis == "replicate" for i in items):
            return tuple(items)
        return tuple(part for item in items for part in _replicated(item, shard))

    def with_waits(self, item: Collective, *, on_gpu: bool) -> Collective:
        """Return a collective with what waits for it: the optimizer for reductions. A gather needs no result.

        In the backward pass a gather is launched ``fsdp.backward_prefetch`` units ahead. With gloo the CPU waits for
        each collective.
        """
        if is_gradient_reduction(item):
            axis = "replicate" if item.kind == "all_reduce" else "shard"
            return replace(item, axis=axis, awaited=OPTIMIZER if on_gpu else NEXT)
        if item.kind in GATHERS:
            ahead = self.backward_prefetch if on_gpu and item.phase == BACKWARD else 0
            return replace(item, axis="shard", ahead=ahead, after_compute=False)
        return item


def _replicated(item: Item, shard: int) -> Iterator[Item]:
    yield item
    if isinstance(item, Collective) and item.kind == "reduce_scatter" and item.axis == "shard" and item.bytes:
        size = item.bytes // shard
        yield replace(item, kind="all_reduce", bytes=size, axis="replicate", ranks=1, host_s=0.0, transfer_s=None)

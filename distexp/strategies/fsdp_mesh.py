"""The device mesh of FSDP: over which workers parameters are sharded, and over which they are replicated."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from distexp.config import Config
from distexp.distributed.context import Context

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
        """Return the mesh axes (replicate, shard).

        Args:
            workers: number of workers on all nodes.
            nodes: number of nodes; hybrid_shard keeps one replica per node.
            replicas: number of replicas of hybrid_shard, instead of one per node.
        """
        replicate = 1
        if self is Sharding.NO_SHARD:
            replicate = workers
        elif self is Sharding.HYBRID_SHARD:
            replicate = replicas or nodes
        return replicate, workers // replicate


def sharding_of(config: Config) -> Sharding:
    """Return the sharding of a configuration whose defaults are set."""
    return Sharding(config.fsdp.sharding or Sharding.FULL_SHARD)


def mesh_shape(config: Config) -> tuple[int, int]:
    """Return the mesh axes (replicate, shard)."""
    cluster = config.cluster
    return sharding_of(config).mesh_shape(cluster.world_size, nodes=cluster.nodes, replicas=config.fsdp.replicas)


ONE_WORKER_AXIS = {
    (True, False): "so nothing is replicated, as with full_shard: use several nodes, or set fsdp.replicas",
    (False, True): "so nothing is sharded",
    (True, True): "so nothing is replicated or sharded",
}
"""What a mesh does whose axes (replicate, shard) have one worker or more."""


def build_mesh(config: Config, context: Context) -> DeviceMesh:
    """Build the mesh; rank 0 prints a note if an axis has only one worker."""
    from torch.distributed.device_mesh import init_device_mesh

    replicate, shard = mesh_shape(config)
    if sharding_of(config).shards_over_all_workers:
        return init_device_mesh(context.device.type, (shard,), mesh_dim_names=("shard",))
    if context.rank == 0 and (effect := ONE_WORKER_AXIS.get((replicate == 1, shard == 1))):
        print(
            f"sharding={config.fsdp.sharding}: the mesh (replicate, shard) is ({replicate}, {shard}), {effect}",
            flush=True,
        )
    return init_device_mesh(context.device.type, (replicate, shard), mesh_dim_names=("replicate", "shard"))

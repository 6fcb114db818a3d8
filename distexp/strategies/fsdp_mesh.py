"""The device mesh of FSDP: over which workers parameters are sharded, and over which they are replicated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distexp.config import Config
from distexp.config.sharding import Sharding
from distexp.distributed.context import Context

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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

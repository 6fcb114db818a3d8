"""The FSDP sharding modes with the device mesh of each, and which strategies shard the optimizer states."""

from __future__ import annotations

from enum import StrEnum


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


def keeps_optimizer_states_whole(strategy: str, *, sharding: str | None, zero_stage: int | None) -> bool:
    """Return whether each worker is known to have all optimizer states, so that it updates all weights.

    Args:
        strategy: name of the strategy. A custom one is not known.
        sharding: ``fsdp.sharding``.
        zero_stage: ``deepspeed.zero_stage``.
    """
    if strategy == "fsdp":
        return sharding == Sharding.NO_SHARD
    return strategy in ("single", "ddp") or (strategy == "deepspeed" and zero_stage == 0)

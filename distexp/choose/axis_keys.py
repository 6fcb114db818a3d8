"""The keys that a search varies, with the values that it tries by default."""

from __future__ import annotations

from collections.abc import Mapping

MICRO_BATCH = "train.micro_batch_size"
CHECKPOINTING = "train.activation_checkpointing"
STRATEGY, SHARDING, STAGE, OFFLOAD, KERNELS = "strategy", "sharding", "zero_stage", "offload", "kernels"

DEFAULT_VALUES: Mapping[str, tuple[str, ...]] = {
    STRATEGY: ("single", "ddp", "fsdp", "deepspeed"),
    SHARDING: ("full_shard", "shard_grad_op", "hybrid_shard"),
    STAGE: ("1", "2", "3"),
    OFFLOAD: ("false", "true"),
    CHECKPOINTING: ("false", "true"),
    KERNELS: ("reference", "fast"),
}
"""Values of each axis, without the micro-batch, whose values are the divisors of a worker's samples."""

AXES = (*DEFAULT_VALUES, MICRO_BATCH)
"""All keys that vary by default."""

GROUP_OF_KEY = {"fsdp.sharding": SHARDING, "deepspeed.zero_stage": STAGE, "offload.enabled": OFFLOAD}
"""The axis of a key that a config group sets. A user may type either."""


def axis_of(key: str) -> str:
    """Return the axis for a typed key: ``sharding`` for ``fsdp.sharding``; any other key as it is."""
    return GROUP_OF_KEY.get(key, key)

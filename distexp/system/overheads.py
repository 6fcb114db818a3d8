"""GPU memory that a trace does not contain: what nvidia-smi shows in addition to torch's reserved memory.

The constants by strategy are from the same records as those in ``hardware/facts.yaml``, with which
``tests/plan/test_overheads.py`` compares them.
"""

from __future__ import annotations

from distexp.config import Config
from distexp.hardware.facts import facts

REPLICATE_MIB = 390.0
"""The communicator that FSDP's ``no_shard`` adds for the replicas, from ``fsdp_sharding/0``."""

HYBRID_MIB = 970.0
"""The communicators that ``hybrid_shard`` adds for shards and replicas, from ``fsdp_sharding/4``."""

DEEPSPEED_MIB = 388.0
"""Communicators that DeepSpeed makes even for one GPU, from ``deepspeed/zero_offload_stages_1_2``."""

DEEPSPEED_SEVERAL_MIB = 384.0
"""What DeepSpeed adds on several GPUs, from ``deepspeed/two_gpu_stages``."""


def overhead_mib(config: Config) -> dict[str, float]:
    """Return the MiB per GPU that NVML reports beyond torch's reserved memory, by part."""
    known = facts().processes
    return {
        "context": known.cuda_context_mib + (known.cudnn_mib if config.model.task == "image_classification" else 0.0),
        "communicators": _communicators_mib(config),
    }


def _communicators_mib(config: Config) -> float:
    several = config.cluster.world_size > 1
    if config.strategy.name == "deepspeed":
        return DEEPSPEED_MIB + (DEEPSPEED_SEVERAL_MIB if several else 0.0)
    if not several:
        return 0.0
    extra = {"no_shard": REPLICATE_MIB, "hybrid_shard": HYBRID_MIB}
    sharding = config.fsdp.sharding if config.strategy.name == "fsdp" else None
    return facts().processes.communicator_mib + extra.get(sharding or "", 0.0)

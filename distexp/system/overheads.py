"""GPU memory that a trace does not contain: what nvidia-smi shows in addition to torch's reserved memory.

The constants are differences of NVML's peak and torch's reserved peak, from the records in
``docs/results`` (H200, torch 2.11, CUDA 13.0, NCCL 2.28). ``tests/plan/test_overheads.py`` compares them with these
records. Other GPUs have not been measured.
"""

from __future__ import annotations

from distexp.config import Config

CONTEXT_MIB = 1309.0
"""CUDA context and loaded kernels, from ``deepspeed/baseline``: one GPU, no communication."""

CUDNN_MIB = 22.0
"""Kernels of convolutions, from ``ddp_multi_gpu/0``: ResNet-50 on one GPU."""

COMMUNICATOR_MIB = 286.0
"""The first NCCL communicator of several GPUs, from ``fsdp_sharding_two_gpus`` and ``ddp_multi_gpu/1``."""

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
    return {
        "context": CONTEXT_MIB + (CUDNN_MIB if config.model.task == "image_classification" else 0.0),
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
    return COMMUNICATOR_MIB + extra.get(sharding or "", 0.0)

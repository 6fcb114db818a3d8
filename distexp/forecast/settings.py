"""The settings of a run that determine its communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distexp.config.sharding import Sharding
from distexp.forecast.collectives import Layout
from distexp.forecast.target import Target

MIB = 2**20
DDP_BUCKET_MB, DDP_FIRST_BUCKET = 25, MIB
"""Defaults of torch: a bucket is closed when it has at least so much."""


@dataclass(frozen=True)
class CommunicationSettings:
    """What determines the collectives of a run.

    Attributes:
        strategy: single, ddp, fsdp, deepspeed, or the name of a custom strategy.
        sharding: Sharding of FSDP.
        replicas: ``fsdp.replicas``.
        backward_prefetch: ``fsdp.backward_prefetch``.
        zero_stage: Stage of DeepSpeed.
        overlap: Whether reductions of DeepSpeed overlap with the backward pass.
        bucket_bytes: Size from which DDP closes a bucket.
        bucket_elements: ``reduce_bucket_size`` of DeepSpeed. None: as many as distexp chooses.
        weight_bytes: Bytes per element of a gathered weight.
        gradient_bytes: Bytes per element of a reduced gradient.
    """

    strategy: str
    sharding: str = Sharding.FULL_SHARD.value
    replicas: int | None = None
    backward_prefetch: int = 1
    zero_stage: int = 0
    overlap: bool = False
    bucket_bytes: float = DDP_BUCKET_MB * MIB
    bucket_elements: int | None = None
    weight_bytes: int = 4
    gradient_bytes: int = 4

    @classmethod
    def of(cls, config: Mapping[str, Any], zero_stage: int | None = None) -> CommunicationSettings:
        """Return the settings of a resolved configuration.

        Args:
            config: The configuration of a record.
            zero_stage: The stage that was built, if it is known.
        """
        ddp, fsdp, deepspeed = (_section(config, name) for name in ("ddp", "fsdp", "deepspeed"))
        strategy = str(_section(config, "strategy").get("name"))
        half = _section(config, "precision").get("name") in ("bf16", "fp16")
        stage = zero_stage if zero_stage is not None else int(deepspeed.get("zero_stage") or 0)
        return cls(
            strategy=strategy,
            sharding=fsdp.get("sharding") or Sharding.FULL_SHARD.value,
            replicas=fsdp.get("replicas"),
            backward_prefetch=int(fsdp.get("backward_prefetch", 1)),
            zero_stage=stage,
            overlap=bool(deepspeed.get("overlap_comm")),
            bucket_bytes=(ddp.get("bucket_cap_mb") or DDP_BUCKET_MB) * MIB,
            bucket_elements=deepspeed.get("reduce_bucket_size"),
            weight_bytes=2 if half else 4,
            gradient_bytes=_gradient_bytes(strategy, str(ddp.get("communication")), stage, half=half),
        )

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Return whether gradients are reduced in each micro-batch, not only in the last one."""
        return self.strategy == "deepspeed" and self.zero_stage >= 2

    @property
    def gathers_once(self) -> bool:
        """Return whether weights are gathered in the first micro-batch and kept for the others."""
        return self.strategy == "fsdp" and self.sharding == Sharding.SHARD_GRAD_OP

    def mesh(self, target: Target) -> tuple[int, int]:
        """Return the number of replicas, and the workers over which each is sharded."""
        if self.strategy != "fsdp":
            return 1, target.workers
        return Sharding(self.sharding).mesh_shape(target.workers, nodes=target.nodes, replicas=self.replicas)

    def layout(self, axis: str, target: Target) -> Layout:
        """Return the process group of an axis: ``all``, ``shard`` or ``replicate``."""
        replicas, shard = self.mesh(target)
        per_node = target.workers_per_node
        if axis == "shard":
            return Layout(shard, -(-shard // per_node), per_node)
        if axis == "replicate":
            replicas_per_node = max(1, per_node // shard)
            return Layout(replicas, -(-replicas // replicas_per_node), per_node)
        return Layout(target.workers, target.nodes, per_node)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _gradient_bytes(strategy: str, communication: str, stage: int, *, half: bool) -> int:
    """Return the bytes of an element of a reduced gradient.

    FSDP reduces in fp32. DeepSpeed reduces in the data type of its weights, which are fp32 at stage 0 with bf16.
    """
    if strategy == "ddp":
        return 2 if communication == "bf16" else 4
    return 2 if strategy == "deepspeed" and half and stage > 0 else 4

"""The settings of a run that determine its communication and its share of the update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from distexp.config import ConfigError
from distexp.config.sharding import Sharding, keeps_optimizer_states_whole
from distexp.forecast.collectives import GroupLayout
from distexp.forecast.target import Target
from distexp.runs.json_files import read_json
from distexp.runs.run_dir import DS_CONFIG

KNOWN_STRATEGIES = ("single", "ddp", "fsdp", "deepspeed")
"""Strategies whose collectives are known before they are profiled on several workers."""
MIB = 2**20
DDP_BUCKET_MB, DDP_FIRST_BUCKET_MB = 25, 1
"""Defaults of torch: a bucket is closed when it has at least so much."""


@dataclass(frozen=True)
class ZeroOptions:
    """The section ``zero_optimization`` of a ds_config, as far as it matters here. The defaults are DeepSpeed's.

    Attributes:
        overlap_comm: Whether reductions overlap with the backward pass. None: at stage 3 only.
        reduce_bucket_size: Most elements of a reduction with several parameters.
        stage3_prefetch_bucket_size: Elements that are gathered ahead at once.
        stage3_param_persistence_threshold: Elements up to which a parameter is kept whole between two updates.
        stage3_max_live_parameters: Elements that are gathered, from which no more are gathered ahead.
        stage3_max_reuse_distance: Elements up to the next use of a parameter, below which it is not released.
    """

    overlap_comm: bool | None = None
    reduce_bucket_size: int = 500_000_000
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_param_persistence_threshold: int = 100_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000

    def overlaps(self, stage: int) -> bool:
        """Return whether reductions of a stage overlap with the backward pass."""
        return stage == 3 if self.overlap_comm is None else self.overlap_comm


def read_zero_options(run_dir: Path) -> ZeroOptions:
    """Return the options that DeepSpeed had in a run.

    Raises:
        ConfigError: The run directory has no readable ds_config.json.
    """
    try:
        content = read_json(run_dir / DS_CONFIG)["zero_optimization"]
        known = {spec.name for spec in fields(ZeroOptions)}
        return ZeroOptions(**{key: value for key, value in content.items() if key in known})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{run_dir} has no readable {DS_CONFIG} ({error}), which a run with DeepSpeed writes: give the directory "
            "that the run has written"
        ) from error


@dataclass(frozen=True)
class CommunicationSettings:
    """What determines the collectives of a run, and its share of the update.

    Attributes:
        strategy: single, ddp, fsdp, deepspeed, or the name of a custom strategy.
        sharding: Sharding of FSDP.
        replicas: ``fsdp.replicas``.
        backward_prefetch: ``fsdp.backward_prefetch``.
        zero_stage: Stage of DeepSpeed.
        zero: Further options of DeepSpeed.
        bucket_bytes: Size from which DDP closes a bucket.
        first_bucket_bytes: The same for the first bucket, which is smaller unless ``ddp.bucket_cap_mb`` is set.
        weight_bytes: Bytes per element of a gathered weight.
        gradient_bytes: Bytes per element of a reduced gradient.
        offloads: Whether the optimizer states are in CPU memory, so that the CPU updates the weights.
    """

    strategy: str
    sharding: str = Sharding.FULL_SHARD.value
    replicas: int | None = None
    backward_prefetch: int = 1
    zero_stage: int = 0
    zero: ZeroOptions = ZeroOptions()
    bucket_bytes: float = DDP_BUCKET_MB * MIB
    first_bucket_bytes: float = DDP_FIRST_BUCKET_MB * MIB
    weight_bytes: int = 4
    gradient_bytes: int = 4
    offloads: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any], zero_stage: int | None = None) -> CommunicationSettings:
        """Return the settings of a resolved configuration, with DeepSpeed's defaults in ``zero``.

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
            bucket_bytes=(ddp.get("bucket_cap_mb") or DDP_BUCKET_MB) * MIB,
            first_bucket_bytes=(ddp.get("bucket_cap_mb") or DDP_FIRST_BUCKET_MB) * MIB,
            weight_bytes=2 if half else 4,
            gradient_bytes=_gradient_bytes(strategy, str(ddp.get("communication")), stage, half=half),
            offloads=bool(_section(config, "offload").get("enabled")),
        )

    @property
    def overlap(self) -> bool:
        """Return whether reductions of DeepSpeed overlap with the backward pass."""
        return self.zero.overlaps(self.zero_stage)

    @property
    def flattens_groups(self) -> bool:
        """Return whether a worker updates a part of each flat group, and not a part of each parameter."""
        return self.strategy == "deepspeed" and self.zero_stage in (1, 2)

    def optimizer_shards(self, target: Target) -> int:
        """Return over how many workers the optimizer states are sharded; 1 if each worker has all of them."""
        if keeps_optimizer_states_whole(self.strategy, sharding=self.sharding, zero_stage=self.zero_stage):
            return 1
        return self.mesh(target)[1] if self.strategy in ("fsdp", "deepspeed") else 1

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

    def layout(self, axis: str, target: Target) -> GroupLayout:
        """Return the process group of an axis: ``all``, ``shard`` or ``replicate``."""
        replicas, shard = self.mesh(target)
        per_node = target.workers_per_node
        if axis == "shard":
            return GroupLayout(shard, -(-shard // per_node), per_node)
        if axis == "replicate":
            replicas_per_node = max(1, per_node // shard)
            return GroupLayout(replicas, -(-replicas // replicas_per_node), per_node)
        return GroupLayout(target.workers, target.nodes, per_node)


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

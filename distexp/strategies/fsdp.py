"""PyTorch FSDP2 (``fully_shard``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, cast

from distexp.config import Config
from distexp.distributed.context import Context
from distexp.strategies.base import DistributedModel, Strategy, block_values
from distexp.strategies.communication import (
    TORCH_PREFETCH,
    FSDPCommunication,
    Sharding,
    mesh_shape,
    sharding_of,
    sharding_workers,
)
from distexp.strategies.parallel.checks import degrees, expected_stages
from distexp.strategies.traits import Advice, CpuMemory, Option, ProfiledStep, Settings, common_values, setting

if TYPE_CHECKING:
    from distexp.models.blueprint import Blueprint

PRELOAD = ("torch.distributed.fsdp",)
"""Imported once for all workers of a node."""

MORE_COMMUNICATORS_MIB = {Sharding.NO_SHARD: 390.0, Sharding.HYBRID_SHARD: 970.0}
"""What a mesh with replicas adds to the first communicator, from ``fsdp_sharding/0`` and ``fsdp_sharding/4``."""


class FSDP(Strategy):
    """Parameters, gradients and optimizer states sharded over the workers."""

    gives_whole_matrices: ClassVar[bool] = True
    supports_low_bits: ClassVar[bool] = True
    hf_adapter: ClassVar[str | None] = "distexp.engines.hf_adapters.FSDPAdapter"
    equals_reference: ClassVar[bool] = True
    complexity: ClassVar[int] = 2
    section: ClassVar[str] = "fsdp"
    option_group: ClassVar[str] = "sharding"
    option_key: ClassVar[str] = "fsdp.sharding"
    smallest_states: ClassVar[str] = "sharding=full_shard"
    shares_layers: ClassVar[bool] = True
    is_compilable: ClassVar[bool] = True
    options: ClassVar[tuple[Option, ...]] = (
        Option("full_shard", offloads=True),
        Option("shard_grad_op", lighter="sharding=full_shard"),
        Option("hybrid_shard", lighter="sharding=full_shard", offloads=True, needs_nodes=True),
    )

    def casts_weights(self, config: Config) -> bool:
        """Return whether the precision has 16 bits: FSDP casts when it gathers."""
        return config.precision.name != "fp32"

    def set_defaults(self, config: Config) -> None:
        """Set the sharding to full_shard."""
        if config.fsdp.sharding is None:
            config.fsdp.sharding = Sharding.FULL_SHARD.value

    def fast_values(self, config: Config) -> Mapping[str, Any]:
        """Compile the blocks, and shard several small ones together."""
        native = config.engine.name == "native"
        return {**block_values(config), **({"fsdp.blocks_per_unit": "auto"} if native else {})}

    def validate(self, config: Config) -> list[str]:
        """Check that the replicas divide the workers, and that no mesh has copies of shards besides other axes."""
        if config.parallel.pipeline > 1 and config.fsdp.wrap != "auto":
            return [
                f"fsdp.wrap={config.fsdp.wrap} is not supported by parallel.pipeline={config.parallel.pipeline}, whose "
                "stages are made of blocks: use fsdp.wrap=auto, or parallel.pipeline=1"
            ]
        if config.parallel.expert > 1 and not sharding_of(config).shards_over_all_workers:
            without = "" if config.fsdp.replicas is None else ", without fsdp.replicas"
            return [
                f"parallel.expert={config.parallel.expert} with sharding={config.fsdp.sharding} is not supported, "
                "because the experts have a mesh without replicas: choose sharding=full_shard, "
                f"sharding=shard_grad_op or strategy=ddp{without}"
            ]
        if config.fsdp.replicas is not None and sharding_of(config) is not Sharding.HYBRID_SHARD:
            return [
                f"fsdp.replicas={config.fsdp.replicas} has no effect with sharding={config.fsdp.sharding}: "
                "leave it out, or choose sharding=hybrid_shard"
            ]
        return _replica_errors(config) if sharding_of(config) is Sharding.HYBRID_SHARD else []

    def hf_errors(self, config: Config) -> list[str]:
        """Refuse meshes and prefetch options that accelerate does not support."""
        errors = []
        replicate, shard = mesh_shape(config)
        if shard == 1 and not sharding_of(config).shards_over_all_workers:
            errors.append(
                f"sharding={config.fsdp.sharding} over {replicate} workers shards nothing, and engine=hf_trainer "
                "does not support that: choose strategy=ddp, or engine=native"
            )
        for key, value in TORCH_PREFETCH.items():
            if getattr(config.fsdp, key) != value:
                errors.append(
                    f"fsdp.{key}={getattr(config.fsdp, key)} is not supported by engine=hf_trainer: "
                    f"use {value}, or engine=native"
                )
        if config.fsdp.blocks_per_unit not in (1, None):
            errors.append(
                f"fsdp.blocks_per_unit={config.fsdp.blocks_per_unit} is not supported by engine=hf_trainer, which "
                "shards each block: use 1, or engine=native"
            )
        return errors

    def main_option(self, config: Config) -> str:
        """Return the sharding."""
        return config.fsdp.sharding or ""

    def shards_all_parameters(self, config: Config) -> bool:
        """Return whether the mesh has no replicas by definition of the sharding."""
        return sharding_of(config).shards_over_all_workers

    def launch_factor(self, config: Config) -> float:
        """Return the measured factor: the hooks run in Python. See docs/results/choose.md and forecast.md."""
        return 3.0

    def communication(self, config: Settings) -> FSDPCommunication:
        """Return the collectives of a step. The sharding is full_shard if it is open."""
        prefetch = setting(config, "fsdp.backward_prefetch")
        return FSDPCommunication(
            **common_values(config),
            sharding=Sharding(setting(config, "fsdp.sharding") or Sharding.FULL_SHARD),
            replicas=setting(config, "fsdp.replicas"),
            backward_prefetch=TORCH_PREFETCH["backward_prefetch"] if prefetch is None else int(prefetch),
        )

    def expected_build(self, config: Config) -> Mapping[str, Any]:
        """Require the mesh, the resharding and the offload of the configuration."""
        return {
            "wrapper": f"fully_shard(reshard_after_forward={sharding_of(config).reshards_after_forward})",
            "world_size": config.cluster.world_size,
            "mesh": list(mesh_shape(config)),
            "tensor": config.parallel.tensor,
            "context": config.parallel.context,
            "expert": config.parallel.expert,
            **expected_stages(config),
            "offload": "parameters+gradients+optimizer" if config.offload.enabled else "none",
        }

    def setup(self, blueprint: Blueprint, config: Config, context: Context) -> DistributedModel:
        """Initialize and shard one unit at a time, then build the optimizer."""
        from torch.distributed.fsdp import FSDPModule, fully_shard

        from distexp.strategies.fsdp_units import MissingGradients, read_distribution, shard_units
        from distexp.strategies.torch_model import TorchModel

        if context.stages > 1:
            from distexp.strategies.parallel.pipeline import pipeline_model

            return pipeline_model(blueprint, config, context, fully_shard)
        model = blueprint.model
        units = shard_units(blueprint, config, context)
        wrapped = cast(FSDPModule, model)
        keeps_parameters = not sharding_of(config).reshards_after_forward

        @contextmanager
        def sync_context(last_micro: bool) -> Iterator[None]:
            wrapped.set_requires_gradient_sync(last_micro)
            if keeps_parameters:  # Gather once per step, because each micro-batch needs all parameters anyway.
                wrapped.set_reshard_after_backward(last_micro)
            yield

        return TorchModel(
            model,
            config,
            context,
            sync_context=sync_context,
            autocast=False,
            distribution=lambda: read_distribution(model, units),
            missing=MissingGradients(model),
        )

    cpu_memory: ClassVar[CpuMemory | None] = CpuMemory(60.0, reserve=2.3)
    accumulates_whole_gradients: ClassVar[bool] = True

    def communicators_mib(self, config: Config) -> float:
        """Add the communicators of the replicas."""
        more = MORE_COMMUNICATORS_MIB.get(sharding_of(config), 0.0) if config.cluster.world_size > 1 else 0.0
        return super().communicators_mib(config) + more

    def smaller_states(self, config: Config, *, workers: int) -> tuple[str, ...]:
        """Return the sharding of all states over all workers, unless it is used already."""
        is_smallest = sharding_of(config) is Sharding.FULL_SHARD
        return () if is_smallest else super().smaller_states(config, workers=workers)

    def supports_offload(self, config: Config) -> bool:
        """Return true."""
        return True

    def advice(self, bottleneck: str, step: ProfiledStep) -> Iterator[Advice]:
        """Yield fewer all-gathers, in a step and for a sample, against communication, and a smaller bubble."""
        if bottleneck not in ("exposed_communication", "bubble"):
            return
        yield from self.fewer_shared_layers(step)
        yield from self.smaller_bubble(step)
        if bottleneck == "bubble":
            return
        gathers_twice = step.setting("fsdp.sharding") == Sharding.FULL_SHARD
        shares = step.collective_shares()  # empty if nothing is known about the kinds
        # From a fifth of the communication, fewer all-gathers are worth more memory.
        take_time = not shares or shares.get("all_gather", 0.0) >= 0.2 * sum(shares.values())
        if gathers_twice and take_time and step.fits_unsharded(bytes_per_parameter=4):
            yield Advice("sharding=shard_grad_op", "it gathers the parameters once per step and keeps them")
        yield from step.larger_micro_batch(2)


def _replica_errors(config: Config) -> list[str]:
    """Check that the replicas divide the workers that have the same part of the model."""
    typed, workers, nodes = config.fsdp.replicas, sharding_workers(config), config.cluster.nodes
    replicas = nodes if typed is None else typed
    if replicas > 0 and workers % replicas == 0:
        return []
    what = f"fsdp.replicas={typed}" if typed is not None else f"sharding=hybrid_shard, with {nodes} replicas for nodes,"
    total, ways = config.cluster.world_size, " ".join(text for text, _ in degrees(config))
    counted = f"{workers} groups of {ways}" if workers < total else f"{total} workers"
    fitting = max(number for number in range(1, max(1, replicas) + 1) if workers % number == 0)
    return [f"{what} must divide the {counted}: use fsdp.replicas={fitting}"]

"""PyTorch FSDP2 (``fully_shard``).

Each block, the embedding and the head are FSDP units. A model without blocks is one unit. ``fsdp.blocks_per_unit`` puts
several blocks into one unit, so that there are fewer collectives, and each is larger.

If embedding and head share one weight, it belongs to the root unit. The root unit is gathered once per step and reduced
once, at the end. A separate unit would be reduced twice, the first time when memory use is at its peak. On four H200s
that cost BLOOM-560m 5 % of its speed and 480 MiB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, cast

from distexp.config import Config, ConfigError
from distexp.config.sharding import Sharding
from distexp.distributed.context import Context
from distexp.strategies.base import DistributedModel, Strategy
from distexp.strategies.fast import block_values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from distexp.models.blueprint import Blueprint
    from distexp.strategies.torch_model import Distribution

PRELOAD = ("torch.distributed.fsdp",)
"""Imported once for all workers of a node."""

MIN_UNIT_PARAMETERS = 30_000_000
"""Least size of a unit with ``fsdp.blocks_per_unit=auto``.

A smaller unit is gathered faster than a CPU can start the work, so the number of collectives limits the speed.
"""

TORCH_PREFETCH = {"forward_prefetch": 0, "backward_prefetch": 1}
"""Number of blocks that torch prefetches by default."""


class FSDP(Strategy):
    """Parameters, gradients and optimizer states sharded over the workers."""

    hf_adapter: ClassVar[str | None] = "distexp.engines.hf_adapters.FSDPAdapter"

    def set_defaults(self, config: Config) -> None:
        """Set the sharding to full_shard."""
        if config.fsdp.sharding is None:
            config.fsdp.sharding = Sharding.FULL_SHARD.value

    def fast_values(self, config: Config) -> Mapping[str, Any]:
        """Compile the blocks, and shard several small ones together."""
        native = config.engine.name == "native"
        return {**block_values(config), **({"fsdp.blocks_per_unit": "auto"} if native else {})}

    def validate(self, config: Config) -> list[str]:
        """Check that the replicas divide the workers."""
        return list(_replicas_errors(config))

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

    def expected_build(self, config: Config) -> Mapping[str, Any]:
        """Require the mesh, the resharding and the offload of the configuration."""
        return {
            "wrapper": f"fully_shard(reshard_after_forward={sharding_of(config).reshards_after_forward})",
            "world_size": config.cluster.world_size,
            "mesh": list(mesh_shape(config)),
            "offload": "parameters+gradients+optimizer" if config.offload.enabled else "none",
        }

    def setup(self, blueprint: Blueprint, config: Config, context: Context) -> DistributedModel:
        """Initialize and shard one unit at a time, then build the optimizer."""
        from torch.distributed.fsdp import FSDPModule

        from distexp.strategies.torch_model import TorchModel

        model = blueprint.model
        units = _shard_units(blueprint, config, context)
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
        )


def sharding_of(config: Config) -> Sharding:
    """Return the sharding of a configuration whose defaults are set."""
    return Sharding(config.fsdp.sharding or Sharding.FULL_SHARD)


def mesh_shape(config: Config) -> tuple[int, int]:
    """Return the mesh axes (replicate, shard)."""
    cluster = config.cluster
    return sharding_of(config).mesh_shape(cluster.world_size, nodes=cluster.nodes, replicas=config.fsdp.replicas)


def _replicas_errors(config: Config) -> Iterator[str]:
    replicas, workers = config.fsdp.replicas, config.cluster.world_size
    if replicas is None:
        return
    if sharding_of(config) is not Sharding.HYBRID_SHARD:
        yield (
            f"fsdp.replicas={replicas} has no effect with sharding={config.fsdp.sharding}: "
            "leave it out, or choose sharding=hybrid_shard"
        )
    elif replicas < 1 or workers % replicas:
        yield (
            f"fsdp.replicas={replicas} must divide the {config.cluster.nodes} x "
            f"{config.cluster.workers_per_node} = {workers} workers"
        )


def _build_mesh(config: Config, context: Context) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    replicate, shard = mesh_shape(config)
    if sharding_of(config).shards_over_all_workers:
        return init_device_mesh(context.device.type, (shard,), mesh_dim_names=("shard",))
    if context.rank == 0 and 1 in (replicate, shard):
        print(
            f"sharding={config.fsdp.sharding}: the mesh (replicate, shard) is ({replicate}, {shard}), so nothing is "
            + ("replicated" if replicate == 1 else "sharded"),
            flush=True,
        )
    return init_device_mesh(context.device.type, (replicate, shard), mesh_dim_names=("replicate", "shard"))


def _shard_units(blueprint: Blueprint, config: Config, context: Context) -> list[nn.Module]:
    """Initialize and shard the units, inner ones first; return the blocks, or the model if it has none."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    from distexp.models.blocks import find_units
    from distexp.models.introspection import find_embeddings, has_tied_embeddings
    from distexp.strategies.torch_model import DTYPES

    policy: dict[str, Any] = {
        "mesh": _build_mesh(config, context),
        "reshard_after_forward": sharding_of(config).reshards_after_forward,
    }
    if config.precision.name != "fp32":
        policy["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=DTYPES[config.precision.name], reduce_dtype=torch.float32
        )
    if config.offload.enabled:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=config.offload.pin_memory)
    model = blueprint.model
    found = find_units(model, config.fsdp.wrap)
    blocks, depths = [module for _, module in found], nesting_depths([name for name, _ in found])
    inner = group_blocks(blocks, blocks_per_unit(config, is_nested=any(depths)))
    if not inner and context.rank == 0:
        print(
            f"note: {type(model).__name__} has no repeated blocks, so FSDP shards it as one unit: to change that, set "
            "fsdp.wrap to class names of its modules",
            flush=True,
        )
    ends = [] if has_tied_embeddings(model) else [module for _, module in find_embeddings(model)]
    inside_first = _deepest_first(inner, depths) if any(depths) else inner
    for group in [*inside_first, *([module] for module in ends), [model]]:
        for module in group:
            blueprint.materialize(module)
        # The backward pass starts with the head. Freeing it after the forward pass would only gather it twice.
        last = (group[0] is model and bool(inner)) or (len(ends) == 2 and group[0] is ends[1])
        fully_shard(
            group if len(group) > 1 else group[0], **policy | ({"reshard_after_forward": False} if last else {})
        )
    _set_prefetch([cast("FSDPModule", group[0]) for group in inner], config)
    return blocks or [model]


def blocks_per_unit(config: Config, *, is_nested: bool) -> int | str:
    """Return the blocks of a unit, or ``auto``. Nested blocks are one unit each.

    Args:
        config: the configuration.
        is_nested: whether some blocks are in other blocks.

    Raises:
        ConfigError: a unit shall have several blocks that are nested.
    """
    size = config.fsdp.blocks_per_unit or 1
    if not is_nested:
        return size
    if isinstance(size, int) and size > 1:
        raise ConfigError(
            f"fsdp.blocks_per_unit={size} is not supported if blocks contain each other, as those of "
            f"fsdp.wrap={config.fsdp.wrap}: use fsdp.blocks_per_unit=1, or name the outer class alone"
        )
    return 1


def nesting_depths(names: Sequence[str]) -> list[int]:
    """Return how many of the other modules contain each module, by their dotted names."""
    return [sum(name.startswith(f"{other}.") for other in names) for name in names]


def _deepest_first(units: Sequence[list[nn.Module]], depths: Sequence[int]) -> list[list[nn.Module]]:
    """Return the units so that no unit is before one that it contains. Else the outer one would shard both."""
    return [unit for _, unit in sorted(zip(depths, units, strict=True), key=lambda each: -each[0])]


def group_blocks(blocks: Sequence[nn.Module], size: int | str) -> list[list[nn.Module]]:
    """Split the blocks, in forward order, into groups that FSDP shards as one unit.

    Args:
        blocks: the blocks of a model.
        size: blocks of a group. ``auto``: as many as have MIN_UNIT_PARAMETERS together, at most all.
    """
    if not blocks:
        return []
    if isinstance(size, str):
        largest = max(sum(parameter.numel() for parameter in block.parameters()) for block in blocks)
        size = -(-MIN_UNIT_PARAMETERS // max(1, largest))
    return [list(blocks[start : start + size]) for start in range(0, len(blocks), size)]


def _set_prefetch(units: list[FSDPModule], config: Config) -> None:
    ahead, behind = config.fsdp.forward_prefetch, config.fsdp.backward_prefetch
    for position, unit in enumerate(units):
        if ahead:
            unit.set_modules_to_forward_prefetch(units[position + 1 : position + 1 + ahead])
        if behind != TORCH_PREFETCH["backward_prefetch"]:
            unit.set_modules_to_backward_prefetch(units[max(0, position - behind) : position][::-1])


def read_distribution(model: nn.Module, inner: Sequence[nn.Module]) -> Distribution:
    """Return how FSDP distributed a model, read from its parameters and units.

    Args:
        model: the root unit.
        inner: the blocks, or the model if it has none. They show whether parameters are resharded after the forward
            pass.

    Raises:
        RuntimeError: parameters were left unsharded.
    """
    from torch.distributed.tensor import DTensor

    from distexp.strategies.torch_model import Distribution
    from distexp.system.torch_internals.fsdp import group_by_fsdp_unit, read_fsdp_policies

    units = [members[0] for members in group_by_fsdp_unit(model)]
    parameters = list(model.parameters())
    sharded = [p for p in parameters if isinstance(p, DTensor)]
    if len(sharded) != len(parameters):
        raise RuntimeError(f"FSDP left {len(parameters) - len(sharded)} of {len(parameters)} parameters unsharded")
    (shape,) = {tuple(p.device_mesh.shape) for p in sharded}
    policies = read_fsdp_policies(units)
    reshards = {policy.reshards_after_forward for policy in read_fsdp_policies(inner)}
    shared = max(len(set(inner).intersection(members)) for members in group_by_fsdp_unit(model))
    offloaded = all(policy.offloads_to_cpu for policy in policies)
    on_cpu = all(p.to_local().device.type == "cpu" for p in sharded)
    return Distribution(
        wrapper=f"fully_shard(reshard_after_forward={'/'.join(map(str, sorted(reshards)))})",
        mesh=[1, *shape] if len(shape) == 1 else list(shape),
        sharded_units=len(units),
        offload="parameters+gradients+optimizer" if offloaded and on_cpu else "none",
        compute_dtype=policies[0].param_dtype,
        blocks_per_unit=shared,
    )

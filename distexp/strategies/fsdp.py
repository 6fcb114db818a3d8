"""FSDP2: torch's ``fully_shard``, one unit for each block, for the embedding and for the head.

Where embedding and head are one weight, it is left to the root unit, which is gathered once for forward
and backward pass and reduced once, at the end. A unit of its own would be reduced twice, the first time
when memory is at its peak: on four H200s that cost BLOOM-560m 5 % of its speed and 480 MiB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from distexp.config import Config
from distexp.distributed.context import Context
from distexp.strategies.base import COMMUNICATION, DistributedModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from distexp.models.blueprint import Blueprint
    from distexp.strategies.torch_model import Distribution

SHARDINGS = ("full_shard", "shard_grad_op", "hybrid_shard", "no_shard")


class FSDP:
    """Parameters, gradients and optimizer states sharded over the workers."""

    requires: tuple[str, ...] = (COMMUNICATION,)

    def set_defaults(self, config: Config) -> None:
        """full_shard where no sharding was chosen."""
        if config.fsdp.sharding is None:
            config.fsdp.sharding = "full_shard"

    def validate(self, config: Config) -> list[str]:
        """A sharding that exists, replicas that divide the workers, prefetching that makes sense."""
        options, workers = config.fsdp, config.cluster.world_size
        errors = []
        if options.sharding not in SHARDINGS:
            errors.append(f"fsdp.sharding={options.sharding} is not one of {', '.join(SHARDINGS)}")
        replicas = options.replicas
        if replicas is not None and options.sharding != "hybrid_shard":
            errors.append(
                f"fsdp.replicas={replicas} splits a hybrid mesh, and this run has "
                f"sharding={options.sharding}: leave it out, or choose sharding=hybrid_shard"
            )
        elif replicas is not None and (replicas < 1 or workers % replicas):
            errors.append(
                f"fsdp.replicas={replicas} must divide the {config.cluster.nodes} x "
                f"{config.cluster.workers_per_node} = {workers} workers"
            )
        for key in ("forward_prefetch", "backward_prefetch"):
            if getattr(options, key) < 0:
                errors.append(f"fsdp.{key}={getattr(options, key)} must be at least 0 blocks")
        return errors

    def main_option(self, config: Config) -> str:
        """Return the sharding, for the title of a run."""
        return config.fsdp.sharding or ""

    def expected_build(self, config: Config) -> Mapping[str, Any]:
        """Sharded units on the mesh that the sharding means, parameters where they belong."""
        reshard = config.fsdp.sharding != "shard_grad_op"
        return {
            "wrapper": f"fully_shard(reshard_after_forward={reshard})",
            "world_size": config.cluster.world_size,
            "mesh": list(mesh_shape(config)),
            "offload": "parameters+gradients+optimizer" if config.offload.enabled else "none",
        }

    def setup(self, blueprint: Blueprint, config: Config, context: Context) -> DistributedModel:
        """Shards the model, unit by unit, and builds the optimizer over the shards."""
        from torch.distributed.fsdp import FSDPModule

        from distexp.strategies.torch_model import TorchModel

        model = blueprint.model
        inner = _shard(blueprint, config, context)
        wrapped = cast(FSDPModule, model)
        gathers_once = config.fsdp.sharding == "shard_grad_op"

        @contextmanager
        def synchronising(last_micro: bool) -> Iterator[None]:
            wrapped.set_requires_gradient_sync(last_micro)
            if gathers_once:  # for all micro-batches of a step: each has all parameters at once in its turn anyway
                wrapped.set_reshard_after_backward(last_micro)
            yield

        return TorchModel(
            model,
            config,
            context,
            synchronising=synchronising,
            autocast=False,
            distribution=lambda: distribution_of(model, inner),
        )


def mesh_shape(config: Config) -> tuple[int, int]:
    """The axes (replicate, shard)."""
    workers = config.cluster.world_size
    replicas = {"no_shard": workers, "hybrid_shard": config.fsdp.replicas or config.cluster.nodes}
    replicate = replicas.get(config.fsdp.sharding or "", 1)
    return replicate, workers // replicate


def _mesh(config: Config, context: Context) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    replicate, shard = mesh_shape(config)
    if config.fsdp.sharding in ("full_shard", "shard_grad_op"):
        return init_device_mesh(context.device.type, (shard,), mesh_dim_names=("shard",))
    if context.rank == 0 and 1 in (replicate, shard):
        print(
            f"sharding={config.fsdp.sharding}: the mesh (replicate, shard) is ({replicate}, {shard}), so nothing is "
            + ("replicated" if replicate == 1 else "sharded"),
            flush=True,
        )
    return init_device_mesh(context.device.type, (replicate, shard), mesh_dim_names=("replicate", "shard"))


def _shard(blueprint: Blueprint, config: Config, context: Context) -> list[nn.Module]:
    """Brings every unit to life and shards it at once, inner ones first; the blocks, their prefetching chained."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    from distexp.models.introspection import find_blocks, find_embeddings, has_tied_embeddings
    from distexp.strategies.torch_model import DTYPES

    policy: dict[str, Any] = {
        "mesh": _mesh(config, context),
        "reshard_after_forward": config.fsdp.sharding != "shard_grad_op",
    }
    if config.precision.name != "fp32":
        policy["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=DTYPES[config.precision.name], reduce_dtype=torch.float32
        )
    if config.offload.enabled:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=config.offload.pin_memory)
    model = blueprint.model
    inner = [module for _, module in find_blocks(model, config.fsdp.wrap)]
    ends = [] if has_tied_embeddings(model) else [module for _, module in find_embeddings(model)]
    for unit in [*inner, *ends, model]:
        blueprint.materialize(unit)
        # The head ends the forward pass and begins the backward pass: to free it between would gather it twice.
        last = unit is model or (len(ends) == 2 and unit is ends[1])
        fully_shard(unit, **policy | ({"reshard_after_forward": False} if last else {}))
    _chain_prefetch(cast("list[FSDPModule]", inner), config)
    return inner


def _chain_prefetch(units: list[FSDPModule], config: Config) -> None:
    ahead, behind = config.fsdp.forward_prefetch, config.fsdp.backward_prefetch
    for position, unit in enumerate(units):
        if ahead:
            unit.set_modules_to_forward_prefetch(units[position + 1 : position + 1 + ahead])
        if behind != 1:  # one block ahead is what FSDP does by itself
            unit.set_modules_to_backward_prefetch(units[max(0, position - behind) : position][::-1])


def distribution_of(model: nn.Module, inner: Sequence[nn.Module]) -> Distribution:
    """Read off the sharded parameters and FSDP's own state; whether it reshards, off the inner units."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from distexp.strategies.torch_model import Distribution

    sharding = [module for module in model.modules() if isinstance(module, FSDPModule)]
    parameters = list(model.parameters())
    sharded = [p for p in parameters if isinstance(p, DTensor)]
    if len(sharded) != len(parameters):
        raise RuntimeError(f"FSDP left {len(parameters) - len(sharded)} of {len(parameters)} parameters unsharded")
    shapes = {tuple(p.device_mesh.shape) for p in sharded}
    (shape,) = shapes
    groups = _parameter_groups(sharding)
    reshards = {group.post_forward_mesh_info is not None for group in _parameter_groups(inner)}
    on_cpu = all(p.to_local().device.type == "cpu" for p in sharded)
    offloaded = all(type(group.offload_policy).__name__ == "CPUOffloadPolicy" for group in groups)
    return Distribution(
        wrapper=f"fully_shard(reshard_after_forward={'/'.join(map(str, sorted(reshards)))})",
        mesh=[1, *shape] if len(shape) == 1 else list(shape),
        sharded_units=len(sharding),
        offload="parameters+gradients+optimizer" if offloaded and on_cpu else "none",
        compute_dtype=groups[0].mp_policy.param_dtype,
    )


def _parameter_groups(units: Sequence[Any]) -> list[Any]:
    return [group for unit in units if (group := unit._get_fsdp_state()._fsdp_param_group) is not None]

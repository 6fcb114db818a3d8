"""The units of FSDP: the modules that it shards and gathers together.

Each block, the embedding and the head are FSDP units. A model without blocks is one unit. ``fsdp.blocks_per_unit`` puts
several blocks into one unit, so that there are fewer collectives, and each is larger.

If embedding and head share one weight, it belongs to the root unit. The root unit is gathered once per step and reduced
once, at the end. A separate unit would be reduced twice, the first time when memory use is at its peak. On four H200s
that cost BLOOM-560m 5 % of its speed and 480 MiB.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

from distexp.config import Config, ConfigError
from distexp.distributed.context import Context
from distexp.distributed.process_group import gather_to_all
from distexp.models.blueprint import Blueprint, check_dimensions, find_embeddings, has_tied_embeddings
from distexp.models.transforms import NO_UNITS, NamedModules, find_units
from distexp.strategies.communication import (
    EXPERT,
    TENSOR,
    TORCH_PREFETCH,
    build_expert_mesh,
    build_mesh,
    build_shared_mesh,
    data_mesh,
    sharding_of,
)
from distexp.strategies.parallel.expert import ExpertCutter, split_by_mesh
from distexp.strategies.parallel.stages import PipelineCut
from distexp.strategies.parallel.tensor import Cutter, has_parameters
from distexp.strategies.torch_model import DTYPES, Distribution, TorchModel, check_equal_use
from distexp.system.torch_internals.collectives import (
    REPLICATION,
    group_by_fsdp_unit,
    read_fsdp_policies,
    unsharded_fsdp_parameters,
)
from distexp.system.torch_internals.tensors import find_leaves, has_values, private_module

MIN_UNIT_PARAMETERS = 30_000_000
"""Least size of a unit with ``fsdp.blocks_per_unit=auto``.

A smaller unit is gathered faster than a CPU can start the work, so the number of collectives limits the speed.
"""


@dataclass(frozen=True)
class Unit:
    """Modules that FSDP shards, gathers and frees together."""

    modules: list[nn.Module]  # the modules, in forward order
    # The backward pass starts with it. Freed after the forward pass, it would only be gathered twice.
    is_needed_first: bool = False


def shard_units(
    blueprint: Blueprint,
    config: Config,
    context: Context,
    shard: Callable[..., Any] | None = None,
    stages: PipelineCut | None = None,
) -> list[nn.Module]:
    """Initialize the units, and shard them by FSDP or another function; return the blocks, or the model without any.

    With ``stages`` they are the units and blocks of this worker.
    """
    model, shard = blueprint.model, shard or fsdp.fully_shard
    units, groups = _plan_units(model, config, context)
    policy = _policy(config, context)
    cutters: list[Cutter | ExpertCutter] = []
    sharing: Callable[[], int] | None = None
    if stages is not None or context.tensor > 1:
        mesh = build_shared_mesh(config, context) if stages is None else stages.mesh
        policy["mesh"] = data_mesh(mesh)
        if context.tensor > 1:
            cutter = Cutter(model, config, context, mesh[TENSOR])
            cutters, sharing = [cutter], cutter.region.workers_with_own_tokens
    if config.parallel.expert > 1:
        cutters.append(ExpertCutter(model, build_expert_mesh(config, context), shard, policy, sharing))
    for unit in units:
        for module in unit.modules:
            blueprint.materialize(module)
            if stages is not None:
                stages.remove_foreign(module.modules())
            for cut in cutters:
                cut(module)
        if stages is not None:
            unit.modules[:] = [each for each in unit.modules if each is model or has_parameters(each)]
        reshard = {"reshard_after_forward": False} if unit.is_needed_first else {}
        if unit.modules:
            shard(unit.modules if len(unit.modules) > 1 else unit.modules[0], **{**policy, **reshard})
    for cut in cutters if stages is None or stages.last in stages.own else ():
        cut.finish()
    if stages is not None:
        stages.finish()
    groups = [group for group in groups if group]
    _set_prefetch([cast(fsdp.FSDPModule, group[0]) for group in groups], config)
    if reduces_zeros(model) and stages is None:  # MissingGradients, which removes the zeros, knows no stages.
        cast(Any, model).set_reduce_scatter_unused_params(True)
    return [block for group in groups for block in group] or [model]


def _set_prefetch(units: list[fsdp.FSDPModule], config: Config) -> None:
    """Set which units are gathered while another one computes. The units are in forward order."""
    ahead, behind = config.fsdp.forward_prefetch, config.fsdp.backward_prefetch
    for position, unit in enumerate(units):
        if ahead:
            unit.set_modules_to_forward_prefetch(units[position + 1 : position + 1 + ahead])
        if behind != TORCH_PREFETCH["backward_prefetch"]:
            unit.set_modules_to_backward_prefetch(units[max(0, position - behind) : position][::-1])


def _plan_units(model: nn.Module, config: Config, context: Context) -> tuple[list[Unit], list[list[nn.Module]]]:
    """Return the units in the order in which they are sharded, and the blocks of each in forward order."""
    check_dimensions(model, "sharding by FSDP")
    named_blocks = find_units(model, config.fsdp.wrap)
    _check_shared_weights(model, named_blocks, config.fsdp.wrap)
    blocks = [block for _, block in named_blocks]
    is_one_unit = config.fsdp.wrap == NO_UNITS
    if not blocks and not is_one_unit and context.rank == 0:
        print(
            f"note: {type(model).__name__} has no repeated blocks, so FSDP shards it as one unit: to change that, set "
            "fsdp.wrap to class names of its modules",
            flush=True,
        )
    names = [name for name, _ in named_blocks]
    depths = [sum(name.startswith(f"{other}.") for other in names) for name in names]  # how many contain each block
    groups = group_blocks(blocks, blocks_per_unit(config, is_nested=any(depths)))
    # No block is sharded before one that it contains. Else FSDP would shard that twice.
    order = sorted(range(len(groups)), key=lambda index: -depths[index]) if any(depths) else range(len(groups))
    units = [Unit(groups[index]) for index in order]
    units += [] if is_one_unit else _embedding_units(model, blocks)
    units.append(Unit([model], is_needed_first=bool(blocks)))
    return units, groups


def replicate(modules: Any, *, reshard_after_forward: bool, shard_placement_fn: Any = None, **policy: Any) -> None:
    """Copy units in place of sharding them."""
    private_module(REPLICATION, "replicate").replicate(modules, **policy)


def replicate_units(blueprint: Blueprint, config: Config, context: Context) -> TorchModel:
    """Return a model whose layers are shared by some workers, and copied by others, with the units of FSDP."""
    units = shard_units(blueprint, config, context, replicate)
    model: Any = blueprint.model

    def sync_context(last_micro: bool) -> AbstractContextManager[None]:
        model.set_requires_gradient_sync(last_micro)
        return nullcontext()

    return TorchModel(
        model,
        config,
        context,
        sync_context=sync_context,
        autocast=False,
        distribution=lambda: read_distribution(model, units),
    )


def _policy(config: Config, context: Context) -> dict[str, Any]:
    policy: dict[str, Any] = {
        "mesh": build_mesh(config, context) if context.tensor == context.stages == 1 else None,
        "reshard_after_forward": sharding_of(config).reshards_after_forward,
    }
    if config.precision.name != "fp32":
        policy["mp_policy"] = fsdp.MixedPrecisionPolicy(
            param_dtype=DTYPES[config.precision.outside_products], reduce_dtype=torch.float32
        )
    if config.offload.enabled:
        policy["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=config.offload.pin_memory)
    return policy


def _embedding_units(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[Unit]:
    """Yield a unit for the embedding and one for the head, unless they share one weight or are blocks.

    If the model names no head, it may compute its logits with the weight of the embedding.
    """
    embeddings = [module for _, module in find_embeddings(model)]
    if has_tied_embeddings(model) or len(embeddings) == 1:
        return
    for position, module in enumerate(embeddings):
        if all(module is not block for block in blocks):
            yield Unit([module], is_needed_first=len(embeddings) == 2 and position == 1)


def _check_shared_weights(model: nn.Module, blocks: NamedModules, wrap: str) -> None:
    """Check that each weight of a block belongs to modules of this block only.

    FSDP would replace the weight in the block, and the other module would keep the old one. Raise ConfigError if a
    module outside of a block has the same weight.
    """
    owners: dict[nn.Parameter, NamedModules] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append((name, module))
    for name, block in blocks:
        inside = set(block.modules())
        for parameter in block.parameters():
            for other, module in owners[parameter]:
                if module not in inside:
                    raise ConfigError(
                        f"fsdp.wrap={wrap} makes {name} a unit, but {name} shares a weight with {other}, which is "
                        f"outside of {name}: set fsdp.wrap to other classes"
                    )


def blocks_per_unit(config: Config, *, is_nested: bool) -> int | str:
    """Return the blocks of a unit, or ``auto``. Nested blocks are one unit each; raise ConfigError for several."""
    size = config.fsdp.blocks_per_unit or 1
    if not is_nested:
        return size
    if isinstance(size, int) and size > 1:
        raise ConfigError(
            f"fsdp.blocks_per_unit={size} is not supported if blocks contain each other, as those of "
            f"fsdp.wrap={config.fsdp.wrap}: use fsdp.blocks_per_unit=1, or name the outer class alone"
        )
    return 1


def group_blocks(blocks: Sequence[nn.Module], size: int | str) -> list[list[nn.Module]]:
    """Split the blocks, in forward order, into groups that FSDP shards as one unit.

    For ``auto`` they have as many as have MIN_UNIT_PARAMETERS together, at most all.
    """
    if not blocks:
        return []
    if isinstance(size, str):
        largest = max(sum(parameter.numel() for parameter in block.parameters()) for block in blocks)
        size = -(-MIN_UNIT_PARAMETERS // max(1, largest))
    return [list(blocks[start : start + size]) for start in range(0, len(blocks), size)]


def reduces_zeros(model: nn.Module) -> bool:
    """Return whether this version of torch can reduce zeros for parameters that have no gradient on a worker."""
    return hasattr(model, "set_reduce_scatter_unused_params")


class MissingGradients:
    """The parameters without a gradient, such as experts that no token of a micro-batch chose.

    FSDP reduces zeros for those that have a gradient on another worker. Those without a gradient on any worker must
    have none, because AdamW would change them otherwise. Only the first step looks for them, and the others if it found
    any on a worker.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.is_active = model, True
        self.used: set[int] = set()  # numbers of the parameters with a gradient on this worker, in this step

    def record(self, loss: Tensor) -> None:
        """Note which parameters the backward pass of a micro-batch will reach."""
        self.is_active = self.is_active and has_values(loss)
        if self.is_active:
            reached = find_leaves(loss)
            unsharded = unsharded_fsdp_parameters(self.model)
            self.used |= {number for number, (unit, _) in enumerate(unsharded) if id(unit) in reached}
            if not reduces_zeros(self.model):
                hint = "FSDP supports that since torch 2.13: install it, or use"
                check_equal_use([f"parameter {number}" for number in self.used], hint)

    def remove(self) -> None:
        """Remove the gradients of parameters that no worker reached in this step; a collective."""
        if not self.is_active:
            return
        parameters = [sharded for _, sharded in unsharded_fsdp_parameters(self.model)]
        everywhere = gather_to_all(self.used)
        for number in set(range(len(parameters))).difference(*everywhere):
            parameters[number].grad = None
        self.is_active = any(len(used) < len(parameters) for used in everywhere)
        self.used = set()


def read_distribution(model: nn.Module, inner: Sequence[nn.Module]) -> Distribution:
    """Return how FSDP distributed a model, read from its parameters and units, or raise RuntimeError.

    The blocks, or the model without any, show whether parameters are resharded after the forward pass.
    """
    units = [members[0] for members in group_by_fsdp_unit(model)]
    is_replicated = "ReplicateModule" in {kind.__name__ for kind in type(model).__mro__}
    parameters = list(model.parameters())
    sharded = [p for p in parameters if isinstance(p, DTensor)]
    if len(sharded) != len(parameters):
        raise RuntimeError(f"FSDP left {len(parameters) - len(sharded)} of {len(parameters)} parameters unsharded")
    experts, others = split_by_mesh(sharded)
    (mesh,) = {p.device_mesh for p in others}
    names = mesh.mesh_dim_names or ()
    shape = [size for name, size in zip(names, mesh.shape, strict=True) if name != TENSOR]
    policies = read_fsdp_policies(units)
    reshards = {policy.reshards_after_forward for policy in read_fsdp_policies(inner)}
    resharding = "/".join(map(str, sorted(reshards)))
    shared = max(len(set(inner).intersection(members)) for members in group_by_fsdp_unit(model))
    offloaded = all(policy.offloads_to_cpu for policy in policies)
    on_cpu = all(p.to_local().device.type == "cpu" for p in sharded)
    return Distribution(
        wrapper="replicate" if is_replicated else f"fully_shard(reshard_after_forward={resharding})",
        mesh=[*shape, 1] if is_replicated else [1, *shape] if len(shape) == 1 else shape,
        tensor=mesh.size(names.index(TENSOR)) if TENSOR in names else 1,
        expert=experts[0].device_mesh[EXPERT].size() if experts else 1,
        sharded_units=len(units),
        offload="parameters+gradients+optimizer" if offloaded and on_cpu else "none",
        compute_dtype=policies[0].param_dtype,
        blocks_per_unit=shared,
    )

"""The units of FSDP: the modules that it shards and gathers together.

Each block, the embedding and the head are FSDP units. A model without blocks is one unit. ``fsdp.blocks_per_unit`` puts
several blocks into one unit, so that there are fewer collectives, and each is larger.

If embedding and head share one weight, it belongs to the root unit. The root unit is gathered once per step and reduced
once, at the end. A separate unit would be reduced twice, the first time when memory use is at its peak. On four H200s
that cost BLOOM-560m 5 % of its speed and 480 MiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from distexp.config import Config, ConfigError
from distexp.distributed.context import Context
from distexp.strategies.fsdp_mesh import build_mesh, sharding_of
from distexp.strategies.fsdp_prefetch import set_prefetch

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp import FSDPModule

    from distexp.models.blueprint import Blueprint

MIN_UNIT_PARAMETERS = 30_000_000
"""Least size of a unit with ``fsdp.blocks_per_unit=auto``.

A smaller unit is gathered faster than a CPU can start the work, so the number of collectives limits the speed.
"""


def shard_units(blueprint: Blueprint, config: Config, context: Context) -> list[nn.Module]:
    """Initialize and shard the units, inner ones first; return the blocks, or the model if it has none."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    from distexp.models.blocks import find_units
    from distexp.models.introspection import find_embeddings, has_tied_embeddings
    from distexp.strategies.torch_model import DTYPES

    policy: dict[str, Any] = {
        "mesh": build_mesh(config, context),
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
    set_prefetch([cast("FSDPModule", group[0]) for group in inner], config)
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

"""The strategies that are tried on a part of the cluster, with and without offloading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from distexp.choose.axes import Axes
from distexp.choose.axis_keys import OFFLOAD, SHARDING, STAGE, STRATEGY
from distexp.choose.cluster_sizes import ClusterSize

VARIANTS = {"fsdp": SHARDING, "deepspeed": STAGE}
"""The axis with the variants of a strategy. An override of this axis chooses the strategy too."""

WITH_OFFLOAD = ("full_shard", "hybrid_shard", "2", "3")
"""Shardings and stages that are tried with offloading."""


@dataclass(frozen=True)
class StrategyChoice:
    """A strategy of a candidate.

    Attributes:
        strategy: Override that chooses it; empty for the strategy of the command.
        offload: Override of offloading; empty for the value of the command.
    """

    strategy: str = ""
    offload: str = ""


def strategy_choices(size: ClusterSize, axes: Axes) -> Iterator[StrategyChoice]:
    """Yield the strategies to try with a number of workers."""
    names = axes.values.get(STRATEGY)
    if names is None:
        yield from (StrategyChoice(offload=offload) for offload in axes.overrides_of(OFFLOAD))
        return
    for name in names:
        if name in VARIANTS:
            yield from _sharded_choices(name, size, axes)
        elif _is_useful(name, size, is_only=len(names) == 1):
            yield StrategyChoice(f"{STRATEGY}={name}")


def _is_useful(name: str, size: ClusterSize, *, is_only: bool) -> bool:
    """Return whether a strategy without sharding is tried. On one worker ``ddp`` is ``single`` with an overhead."""
    if name == "single":
        return size.workers == 1
    return name != "ddp" or size.workers > 1 or is_only


def _sharded_choices(name: str, size: ClusterSize, axes: Axes) -> Iterator[StrategyChoice]:
    """Yield the variants of FSDP or DeepSpeed. A variant that is the only one is tried in any case."""
    axis = VARIANTS[name]
    variants = axes.values.get(axis, ())
    is_only = len(variants) <= 1
    # On one worker nothing is sharded, so only offloading makes a difference to ``single``.
    needs_offload = size.workers == 1 and "single" in axes.values[STRATEGY]
    for variant in variants or ("",):
        if variant == "hybrid_shard" and size.nodes == 1 and not is_only:
            continue
        for offload in axes.overrides_of(OFFLOAD):
            if offload == f"{OFFLOAD}=false" and needs_offload:
                continue
            if offload == f"{OFFLOAD}=true" and variant not in WITH_OFFLOAD and not is_only:
                continue
            yield StrategyChoice(f"{axis}={variant}" if variant else f"{STRATEGY}={name}", offload)

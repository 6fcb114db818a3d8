"""The strategies that are tried on a part of the cluster, with and without offloading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from distexp.choose.axes import Axes
from distexp.choose.axis_keys import OFFLOAD, STRATEGY, STRATEGY_OF
from distexp.choose.cluster_sizes import ClusterSize
from distexp.strategies.base import reference_name
from distexp.strategies.step_traits import Option, StepTraits

Kinds = Mapping[str, type[StepTraits]]
"""The class of each strategy by its name."""


@dataclass(frozen=True)
class StrategyChoice:
    """A strategy of a candidate.

    Attributes:
        strategy: Override that chooses it; empty for the strategy of the command.
        offload: Override of offloading; empty for the value of the command.
    """

    strategy: str = ""
    offload: str = ""


def strategy_choices(size: ClusterSize, axes: Axes, kinds: Kinds) -> Iterator[StrategyChoice]:
    """Yield the strategies to try with a number of workers."""
    names = axes.values.get(STRATEGY)
    if names is None:
        yield from (StrategyChoice(offload=offload) for offload in axes.overrides_of(OFFLOAD))
        return
    for name in names:
        if name in STRATEGY_OF.values():
            yield from _sharded_choices(name, kinds[name], size, axes)
        elif _is_useful(kinds[name], size, is_only=len(names) == 1):
            yield StrategyChoice(f"{STRATEGY}={name}")


def _is_useful(kind: type[StepTraits], size: ClusterSize, *, is_only: bool) -> bool:
    """Return whether a strategy without options is tried. On one worker ``ddp`` is ``single`` with an overhead."""
    if kind.max_workers is not None and size.workers > kind.max_workers:
        return False
    return is_only or kind.is_reference or not kind.equals_reference(size.workers)


def _sharded_choices(name: str, kind: type[StepTraits], size: ClusterSize, axes: Axes) -> Iterator[StrategyChoice]:
    """Yield the options of a strategy such as FSDP or DeepSpeed. One that is the only one is tried in any case."""
    axis = kind.option_group
    values = axes.values.get(axis, ())
    is_only = len(values) <= 1
    # On one worker nothing is sharded, so only offloading makes a difference to the reference.
    needs_offload = kind.equals_reference(size.workers) and reference_name() in axes.values[STRATEGY]
    known = {option.value: option for option in kind.options}
    for value in values or ("",):
        option = known.get(value, Option(value))
        if option.needs_nodes and size.nodes == 1 and not is_only:
            continue
        for offload in axes.overrides_of(OFFLOAD):
            if offload == f"{OFFLOAD}=false" and needs_offload:
                continue
            if offload == f"{OFFLOAD}=true" and not option.offloads and not is_only:
                continue
            yield StrategyChoice(f"{axis}={value}" if value else f"{STRATEGY}={name}", offload)

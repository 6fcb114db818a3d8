"""The keys that a search varies, with the values that it tries by default: strategies state their options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from distexp.strategies.base import shipped_strategies

MICRO_BATCH = "train.micro_batch_size"
CHECKPOINTING = "train.activation_checkpointing"
STRATEGY, OFFLOAD, KERNELS = "strategy", "offload", "kernels"

STRATEGY_OF = {kind.option_group: name for name, kind in shipped_strategies().items() if kind.option_group}
"""The strategy that an override of an option group chooses: ``fsdp`` for ``sharding``."""

DEFAULT_VALUES: Mapping[str, tuple[str, ...]] = {
    STRATEGY: tuple(shipped_strategies()),
    **{
        kind.option_group: tuple(option.value for option in kind.options)
        for kind in shipped_strategies().values()
        if kind.option_group
    },
    OFFLOAD: ("false", "true"),
    CHECKPOINTING: ("false", "true"),
    KERNELS: ("reference", "fast"),
}
"""Values of each axis, without the micro-batch, whose values are the divisors of a worker's samples."""

AXES = (*DEFAULT_VALUES, MICRO_BATCH)
"""All keys that vary by default."""

GROUP_OF_KEY = {
    **{kind.option_key: kind.option_group for kind in shipped_strategies().values() if kind.option_group},
    "offload.enabled": OFFLOAD,
}
"""The axis of a key that a config group sets. A user may type either."""


def axis_of(key: str) -> str:
    """Return the axis for a typed key: ``sharding`` for ``fsdp.sharding``; any other key as it is."""
    return GROUP_OF_KEY.get(key, key)


def strategy_in(overrides: Iterable[str]) -> str:
    """Return the name of the strategy that overrides choose, also by its option group; empty if they choose none."""
    for text in overrides:
        key, _, value = text.partition("=")
        if key == STRATEGY or key in STRATEGY_OF:
            return STRATEGY_OF.get(key, value)
    return ""

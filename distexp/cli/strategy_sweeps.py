"""Warnings about sweeps over strategies with an option that only one strategy has, such as ``zero_stage=2``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hydra.core.override_parser.types import Glob, Override

from distexp.cli.overrides import plain_value
from distexp.resolve.implied_strategy import implied_strategy

IMPLYING_GROUPS = ("sharding", "zero_stage")
"""Groups whose options imply a strategy."""

STRATEGY_WITH_DEFAULT = {"zero_stage=2": "deepspeed", "sharding=full_shard": "fsdp"}
"""Options that are the default of a strategy."""


def strategy_sweep_warnings(overrides: Sequence[Override]) -> Iterator[str]:
    """Yield a warning for each option that makes cells of a sweep over strategies invalid, with what to type."""
    by_key = {override.get_key_element(): override for override in overrides}
    swept = by_key.get("strategy")
    if swept is None or not swept.is_sweep_override() or isinstance(swept.value(), Glob):
        return
    for override in (by_key[group] for group in IMPLYING_GROUPS if group in by_key):
        implied = {implied_strategy(override.get_key_element(), option) for option in _values(override)}
        others = [strategy for strategy in _values(swept) if strategy not in implied]
        if len(implied) == 1 and None not in implied and others:
            yield _warning(str(override.input_line).replace("'", ""), str(*implied), others)


def _values(override: Override) -> list[str]:
    if isinstance(override.value(), Glob):
        return []
    values = override.sweep_iterator() if override.is_sweep_override() else [override.value()]
    return [str(plain_value(value)) for value in values]


def _warning(option: str, implied: str, others: Sequence[str]) -> str:
    """Return the warning, with a sweep that has one cell for each strategy."""
    rest = ",".join(others)
    is_default = STRATEGY_WITH_DEFAULT.get(option) == implied
    short = f"strategy={rest},{implied} without {option} (the default), or " if is_default else ""
    return (
        f"{option} is for strategy={implied}, so the cells with strategy={rest} are invalid: to compare them, write "
        f"""{short}'sweep.cells=[["strategy={rest}"],["{option}"]]'"""
    )
